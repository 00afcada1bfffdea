"""Run the tests that others wrote on a simulated device, and compare with a table.

``python -m scripts.peer_suites CHECKOUT`` runs the files of ``FOLDERS`` that a checkout of
torch_npu or vllm-ascend has, each in a process of its own, in a stack with ``sim setup --with
tests``. ``tests/data/peer_suites.toml`` has the kind of reason of each test that does not pass; one
that fails without a row is a defect. Status 1 if there is one. Nothing of the checkout is kept.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from vllm_memprof.sim.profiles import PROFILES_DIR

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests/data/peer_suites.toml"
MARK = "PEER "
#: Both run in the stack's Python, with a checkout and a file: a line for each test that has ended.
UNITTEST = r"""
import importlib.util, json, os, re, sys, unittest
path, left_out = sys.argv[2:]
os.chdir(os.path.dirname(path))
sys.path.insert(0, os.getcwd())
sys.argv = [path]
os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"  # messages end with the error
# what tests compile includes headers of a submodule, which the wheel has too
wheel = importlib.util.find_spec("torch_npu").submodule_search_locations[0]
os.environ["CPATH"] = wheel + "/include/third_party/acl/inc"
class Told(unittest.TestResult):
    def say(self, test, outcome, why=""):
        lines = [line for line in str(why).splitlines() if line.strip()]
        name = test.id().removeprefix(module) if hasattr(test, "id") else str(test)
        print("\nPEER " + json.dumps([name, outcome, " | ".join(lines[-3:])[-400:]]), flush=True)
    def addSuccess(self, test): self.say(test, "passed")
    def addSkip(self, test, why): self.say(test, "skipped", why)
    def addFailure(self, test, err): self.say(test, "failed", self._exc_info_to_string(err, test))
    def addError(self, test, err): self.say(test, "failed", self._exc_info_to_string(err, test))
    def addExpectedFailure(self, test, err): self.say(test, "passed")
    def addUnexpectedSuccess(self, test): self.say(test, "failed", "unexpected success")
    def addSubTest(self, test, sub, err):
        if err: self.say(sub, "failed", self._exc_info_to_string(err, test))
module = os.path.basename(path)[:-3] + "."
suite = unittest.defaultTestLoader.loadTestsFromName(module[:-1])
def tests_of(suite):
    for each in suite:
        yield from tests_of(each) if isinstance(each, unittest.TestSuite) else [each]
told = Told()
tests = []
for test in tests_of(suite):
    leave = re.search(left_out, path + "::" + test.id().removeprefix(module))
    told.say(test, "left out") if leave else tests.append(test)
unittest.TestSuite(tests).run(told)
"""
PYTEST = r"""
import multiprocessing.util  # first: at the end finalizers of engines come before it waits for them
import asyncio, faulthandler, gc, inspect, json, os, re, sys, tempfile, wave, PIL.Image, pytest
root, path, left_out = sys.argv[1:]
os.chdir(root)
cache = tempfile.TemporaryDirectory()
os.environ["VLLM_ASSETS_CACHE"] = cache.name
# tests download cherry blossoms and songs: here they are black, and 10 seconds of silence
os.mkdir(assets := cache.name + "/vllm_public_assets")
PIL.Image.new("RGB", (1024, 683)).save(assets + "/cherry_blossom.jpg")
for name in ("mary_had_lamb", "winning_call"):
    with wave.open(f"{assets}/{name}.ogg", "wb") as song:
        song.setparams((1, 2, 16000, 0, "NONE", ""))
        song.writeframes(bytes(320000))
sys.path[:] = [*filter(None, sys.path), root]  # the stack's package before a checkout's sources
os.environ["PYTHONSAFEPATH"] = "1"  # also in children
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # as in the workflows of vllm-ascend
class Told:
    def pytest_collection_modifyitems(self, items):
        for item in [each for each in items if re.search(left_out, each.nodeid)]:
            self.tell(item, "left out")
            items.remove(item)
    def pytest_pyfunc_call(self, pyfuncitem):
        names = pyfuncitem._fixtureinfo.argnames
        if inspect.iscoroutinefunction(pyfuncitem.obj):
            asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
            return True
    def pytest_collectreport(self, report):
        if report.failed: self.tell(report, "failed", report.longrepr)
    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            self.tell(report, report.outcome, report.longrepr)
    def tell(self, test, outcome, why=""):
        crash = getattr(why, "reprcrash", None)
        why = " | ".join(str(crash.message if crash else why or "").splitlines())[:400]
        name = test.nodeid.partition("::")[2] or "(import)"
        print("\nPEER " + json.dumps([name, outcome, why]), flush=True)
# neither pytest nor Python collects the garbage of all of vLLM at the end, which takes long
left = [word for name in ("cacheprovider", "unraisableexception") for word in ("-p", "no:" + name)]
status = pytest.main([path, "-s", "-q", "--import-mode=append", *left], plugins=[Told()])
gc.freeze()
faulthandler.dump_traceback_later(10)  # a process that does not end then says where it is
sys.exit(0 if status in (0, 1, 5) else int(status))
"""
#: Messages of a process that only knows that another failed, and what such a process prints.
ELSEWHERE = re.compile(
    "See root cause above|See stack trace|EngineDeadError|Server at .* exited unexpectedly"
)
CAUSE = re.compile(r"\b((?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|NotFound): .*)")
#: Tests of operators compare values of tensors above the limits that an engine runs with.
LIMITS = {"kept_copy_bytes": 64 << 20, "host_compute_bytes": 16 << 20}
#: Of a checkout: what runs a folder's files, and options of `sim run`. The first that has a file.
FOLDERS: dict[str, tuple[str, list[str]]] = {
    "test/npu": (UNITTEST, ["--device", "{profile}"]),
    "test/allocator": (UNITTEST, ["--device", "{profile}"]),
    "tests/e2e/pull_request/one_card/_310p": (PYTEST, ["--dummy-weights", "--device", "310p"]),
    "tests/e2e/pull_request/one_card": (PYTEST, ["--dummy-weights"]),
    "tests/e2e/pull_request/two_card": (PYTEST, ["--dummy-weights"]),
}


def write_profile(folder: Path) -> Path:
    """Write the default device with ``LIMITS``; return its file."""
    text = (PROFILES_DIR / "ascend910b.toml").read_text()
    for key, value in LIMITS.items():
        text = re.sub(rf"(?m)^{key} = [\d_]+", f"{key} = {value}", text)
    path = folder / "peer_suites.toml"
    path.write_text(text)
    return path


def resident_bytes(group: int) -> int:
    """Return the memory of a session's processes: no pages of files; shared ones in each."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            session = (folder / "stat").read_text().rpartition(")")[2].split()[3]
            status = (folder / "status").read_text() if int(session) == group else ""
        except OSError:  # it has ended
            continue
        sizes = re.findall(r"(?m)^Rss(?:Anon|Shmem):\s+(\d+) kB", status)
        total += sum(int(size) << 10 for size in sizes)
    return total


def run_file(
    command: list[str], timeout_s: float, limit: int, log: Path | None = None
) -> list[list[str]]:
    """Return a file's tests: name, outcome (passed, skipped, failed) and the end of its message.

    A message that only says that another process failed has the last error that was printed behind.
    A file that ends otherwise, not in time, or at the limit of memory, has one more "test" that
    says so.
    """
    deadline_s = time.monotonic() + timeout_s
    ended = ""
    with tempfile.TemporaryFile("w+", errors="replace") as told:
        with subprocess.Popen(
            command, stdout=told, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT
        ) as process:
            while process.poll() is None and not ended:
                time.sleep(0.2)
                if time.monotonic() > deadline_s:
                    ended = f"no end within {timeout_s:g} s"
                elif resident_bytes(process.pid) > limit:
                    ended = f"more than {limit >> 30} GiB of host memory"
            subprocess.run(["pkill", "-9", "-s", str(process.pid)], check=False)
        told.seek(0)
        text = told.read()
        if log is not None:
            log.write_text(text)
        lines = text.splitlines()
    ended = ended or f"status {process.returncode}"
    tests: list[list[str]] = []
    cause = ""
    for line in lines:
        if line.startswith(MARK):
            test, outcome, message = json.loads(line[len(MARK) :])
            if cause and ELSEWHERE.search(message):
                message = f"{message} | {cause}"
            tests.append([test, outcome, message])
            cause = ""
        elif (found := CAUSE.search(line)) and not ELSEWHERE.search(line):
            cause = found[1][:300]
    if ended != "status 0":
        last = [line for line in lines if line.strip() and not line.startswith(MARK)]
        tests.append(["(end of the file)", "failed", f"{ended}: {' | '.join(last[-2:])[-300:]}"])
    return tests


def classify(test: str, message: str, rows: list[dict[str, str]]) -> str | None:
    """Return the reason that the table has for a test; None: it is a defect."""
    for row in rows:
        if re.search(row.get("test", ""), test) and re.search(row.get("says", ""), message):
            return row["reason"]
    return None


def main() -> int:
    """Run, print the table, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "checkout", type=Path, help="torch_npu or vllm-ascend, of the stack's release"
    )
    parser.add_argument("--only", default="", help="files whose path this expression is found in")
    parser.add_argument("--without", help="leave out tests that this expression is found in")
    parser.add_argument("--stack", help="default: the one of `memprof plan`")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each file")
    parser.add_argument("--memory", type=int, default=8, help="GiB of the host for each file")
    parser.add_argument("--output", type=Path, help="all outcomes, as lines of JSON")
    parser.add_argument("--logs", type=Path, help="folder for what the files print")
    given = parser.parse_args()
    with TABLE.open("rb") as file:
        rows = tomllib.load(file)["row"]
    never = [row["test"] for row in rows if row.get("start") == "no"]
    left_out = "|".join([*never, *filter(None, [given.without])]) or "(?!)"
    counts, defects, reasons = Counter[str](), [], defaultdict[str, int](int)
    root = given.checkout.resolve()
    profile = write_profile(Path(tempfile.mkdtemp()))
    files: dict[Path, str] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("test_*.py")):
            files.setdefault(path, folder)
    for path, folder in files.items():
        name = str(path.relative_to(root))
        if not re.search(given.only, name):
            continue
        start_s = time.monotonic()
        own = Counter[str]()
        runner, options = FOLDERS[folder]
        options = [option.format(profile=profile) for option in options]
        options += ["--stack", given.stack] if given.stack else []
        command = [sys.executable, "-m", "vllm_memprof", "sim", "run", *options]
        command += ["python", "-c", runner, str(root), str(path), left_out]
        log = given.logs and given.logs / f"{name.replace('/', '.')}.log"
        for test, outcome, message in run_file(command, given.timeout, given.memory << 30, log):
            own[outcome] += 1
            full = f"{name}::{test}"
            reason = classify(full, message, rows) if outcome in ("failed", "left out") else None
            if reason or outcome == "failed":
                reasons[reason or "defect"] += 1
                defects += [] if reason else [f"{full}: {message}"]
            if given.output:
                with given.output.open("a") as lines:
                    lines.write(json.dumps([full, outcome, reason, message]) + "\n")
        counts += own
        print(f"{name:60} {dict(own)} {time.monotonic() - start_s:.0f} s", flush=True)
    print(f"\n{dict(counts)}; failed by reason: {dict(reasons)}")
    for defect in defects:
        print(f"defect: {defect}", file=sys.stderr)
    return 1 if defects else 0


if __name__ == "__main__":
    raise SystemExit(main())
