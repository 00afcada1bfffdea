"""The entry point: inert, idempotent, harmless, cheap, and itself again after a fork."""

from __future__ import annotations

from .conftest import START_UP, Run

REGISTER = """
import vllm.version, torch, torch_npu
from vllm_memprof.capture.plugin import register
register()
"""


def test_inert_without_a_run_folder(run_engine: Run) -> None:
    code = (
        "import sys, torch_npu\n"
        "from vllm_memprof.capture.plugin import register\n"
        "before = set(sys.modules); finders = len(sys.meta_path); register()\n"
        "print(sorted(set(sys.modules) - before), len(sys.meta_path) - finders,"
        " hasattr(torch_npu._C._npu_emptyCache, '__memprof__'))"
    )
    recorded = run_engine(code, record=False)

    assert recorded.out.strip() == "[] 0 False"
    assert not recorded.files


def test_a_second_call_changes_nothing(run_engine: Run) -> None:
    code = REGISTER + (
        "import sys\nfirst = torch_npu._C._npu_emptyCache; finders = len(sys.meta_path)\n"
        "register(); register()\n"
        "print(torch_npu._C._npu_emptyCache is first, len(sys.meta_path) - finders)"
    )
    assert run_engine(code).out.split() == ["True", "0"]


def test_loads_neither_the_launcher_s_libraries_nor_the_engine(run_engine: Run) -> None:
    code = (
        "import sys\nfrom vllm_memprof.capture.plugin import register\nregister()\n"
        "heavy = {'pandas', 'rich', 'typer', 'numpy',"
        " 'torch', 'torch_npu', 'vllm', 'vllm_ascend', 'uvicorn'}\n"
        "ours = {name.split('.')[1] for name in sys.modules if name.startswith('vllm_memprof.')}\n"
        "print(sorted(heavy & set(sys.modules)), sorted(ours))"
    )
    assert (
        run_engine(code).out.strip()
        == "[] ['capture', 'engines', 'errors', 'files', 'options', 'record', 'redact', 'units', 'version']"
    )


def test_worker_modules_are_not_imported_early(run_engine: Run) -> None:
    code = (
        REGISTER
        + "import sys\nprint([n for n in sys.modules if n.startswith(('vllm_ascend', 'vllm.v1'))])"
    )

    assert run_engine(code).out.strip() == "[]"


def test_writes_nothing_where_no_phase_happens(run_engine: Run) -> None:
    assert not run_engine(REGISTER).files


def test_inert_in_the_model_inspection_process(run_engine: Run) -> None:
    code = (
        "import sys, types\nfrom importlib.machinery import ModuleSpec\n"
        "spec = ModuleSpec('vllm.model_executor.models.registry', None)\n"
        "sys.modules['__main__'].__spec__ = spec\n"
    ) + START_UP
    recorded = run_engine(code + "EngineCore(executor())")

    assert recorded.code == 0, recorded.err
    assert not recorded.files


def test_a_failure_to_start_is_said_and_not_raised(run_engine: Run) -> None:
    code = (
        "import vllm_memprof.capture.observer as observer\n"
        "def broken(run_dir, engine): raise OSError('no space left')\n"
        "observer.start = broken\n"
    )
    recorded = run_engine(code + REGISTER + "print('serving')")

    assert (recorded.code, recorded.out.strip()) == (0, "serving")
    assert "memprof: not recording process" in recorded.err
    assert "no space left" in recorded.err


def test_an_unwritable_folder_costs_the_record_and_not_the_engine(
    run_engine: Run, tmp_path_factory: object
) -> None:
    code = "import pathlib\npathlib.Path('events').write_text('in the way')\n" + START_UP
    recorded = run_engine(code + "EngineCore(executor())\nprint('serving')")

    assert (recorded.code, recorded.out.strip()) == (0, "serving")
    assert recorded.err.count("memprof: cannot write") == 1


def test_a_forked_child_has_its_own_file_phases_and_role(run_engine: Run) -> None:
    code = START_UP + (
        "import os\n"
        "import vllm_memprof.capture.plugin as p\n"
        "recorder = p.RECORDER\n"
        "recorder.roles.add('api')\n"
        "outer = recorder.begin('warm_up', 'test')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    EngineCore(executor())\n"
        "    os._exit(0)\n"
        "_, status = os.waitpid(child, 0)\n"
        "recorder.end(outer)\n"
        "print(os.waitstatus_to_exitcode(status))"
    )
    recorded = run_engine(code)

    assert recorded.out.strip() == "0", recorded.err
    by_role = {events[0]["role"]: events for events in recorded.files.values()}
    assert set(by_role) == {"api", "worker"}
    assert [event["phase"] for event in by_role["api"] if event["kind"] == "phase"] == [
        "warm_up",
        "warm_up",
    ]
    child_phases = [event for event in by_role["worker"] if event["kind"] == "phase"]
    assert child_phases[0]["phase"] == "device_init"
    assert child_phases[0]["parent"] is None
    assert by_role["worker"][0]["pid"] != by_role["api"][0]["pid"]


def test_server_readiness(run_engine: Run) -> None:
    code = (
        REGISTER
        + "import asyncio\nfrom uvicorn.server import Server\nasyncio.run(Server().serve())"
    )
    recorded = run_engine(code)

    assert [event["what"] for event in recorded.kind("ready")] == ["server"]
    assert recorded.events[0]["role"] == "api"
