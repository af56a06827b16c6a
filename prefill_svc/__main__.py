"""``python -m prefill_svc`` is ``prefill-svc``."""

import sys

from prefill_svc.main import main

if __name__ == "__main__":
    sys.exit(main())
