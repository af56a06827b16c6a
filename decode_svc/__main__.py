"""``python -m decode_svc`` is ``decode-svc``."""

import sys

from decode_svc.main import main

if __name__ == "__main__":
    sys.exit(main())
