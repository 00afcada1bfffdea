"""``python -m tests.support.toy_engine ...``: memprof, with one engine more and any device."""

from vllm_memprof.cli import main
from vllm_memprof.launch.prepare import DEVICE_FILES

DEVICE_FILES.clear()
main()
