"""Who may import whom, read off the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "autoplace"

# Lowest first. A module imports from its own line and the lines above it, never from below.
LAYERS = (
    ("_version", "importing"),
    (
        "errors",
        "units",
        "device_names",
        "engines",
        "cgroups",
        "cpus",
        "interpreter",
        "processes",
        "untracked",
    ),
    ("clock", "shared_array"),
    ("accelerators", "device", "files", "home"),
    ("machine", "workload"),
    ("measurement",),
    ("sections",),
    ("ppo", "envs", "presets"),
    ("products",),
    ("physics",),
    ("model_parameters",),
    ("fit_products",),
    ("correction", "rates"),
    ("standard_errors",),
    ("fitting",),
    ("contention", "cost_model"),
    ("measure",),
    ("crossover", "planner", "whatif"),
    ("results", "store"),
    ("kept_model",),
    ("train",),
    ("race",),
    ("close_calls",),
    ("prepare", "export"),
    ("report", "plots"),
    (
        "cli_options",
        "cli_output",
        "cli_live",
        "cli_planning",
        "cli_compare",
        "cli_runs",
        "cli",
        "__main__",
    ),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def part_of(module: str) -> str:
    """The part of the package that ``autoplace.x.y`` belongs to."""
    return module.split(".")[1] if "." in module else "autoplace"


def imports_of(path: Path, *, with_types: bool = False) -> set[str]:
    """Modules of the package that a file imports, those for type checking only left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(child for body in node.body for child in ast.walk(body))
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped and not with_types:
            continue
        if isinstance(node, ast.Import):
            found.update(a.name for a in node.names if a.name.split(".")[0] == "autoplace")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "autoplace":
            assert node.module is not None and node.level == 0
            if node.module == "autoplace":
                found.update(f"autoplace.{a.name}" for a in node.names)
            else:
                found.add(node.module)
    return found


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def name_of(path: Path) -> str:
    return ".".join(("autoplace", *path.relative_to(PACKAGE).with_suffix("").parts))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_down_only(path: Path) -> None:
    own = part_of(name_of(path))
    assert own in RANK, f"{own} has no place in the layers"
    for module in imports_of(path):
        other = part_of(module)
        assert RANK[other] <= RANK[own], f"{name_of(path)} imports {module} from above"


def test_no_two_files_import_each_other() -> None:
    graph = {name_of(path): imports_of(path) for path in FILES}
    graph = {name.removesuffix(".__init__"): imported for name, imported in graph.items()}

    def reaches(start: str, goal: str, seen: set[str]) -> bool:
        for step in graph.get(start, ()):
            if step == goal:
                return True
            if step not in seen:
                seen.add(step)
                if reaches(step, goal, seen):
                    return True
        return False

    # The exceptions: methods of a plan that are written in files about plans.
    graph["autoplace.planner.plan"] -= {"autoplace.planner.explain", "autoplace.planner.handover"}
    for name in graph:
        assert not reaches(name, name, set()), f"{name} imports itself in a circle"


def test_only_the_device_module_reaches_into_torchs_devices() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert "torch.cuda." not in text, path
        if path.name not in ("device.py", "accelerators.py"):
            assert "get_device_module" not in text, path
            assert "torch.accelerator" not in text, path


def test_only_the_command_line_prints() -> None:
    for path in FILES:
        calls = {
            node.func.id
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        may = path.name == "accelerators.py" or path.name.startswith("cli")
        assert "print" not in calls or may, path


def test_nothing_counts_cpus_that_it_may_not_use() -> None:
    for path in FILES:
        assert "os.cpu_count(" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize(
    "module",
    [
        "autoplace",
        "autoplace.cli",
        "autoplace.cost_model",
        "autoplace.planner.search",
        "autoplace.envs",
        "autoplace.store",
        "autoplace.report",
        "autoplace.plots",
        "autoplace.close_calls",
        "autoplace.train.sampler_process",
        "autoplace.prepare",
        "autoplace.presets",
    ],
)
def test_these_do_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("module", "unneeded"),
    [
        ("autoplace.train.learner_process", {"gymnasium", "scipy", "tensorboard"}),
        ("autoplace.train.sampler_process", {"scipy", "tensorboard"}),
        ("autoplace.train.loop", {"sklearn", "matplotlib", "tensorboard"}),
    ],
)
def test_a_run_and_its_processes_import_only_what_they_need(
    module: str, unneeded: set[str]
) -> None:
    code = f"import sys, {module}; sys.exit(', '.join({unneeded} & set(sys.modules)) or None)"
    found = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr


def test_the_public_names_are_all_there_and_functions_are_not_hidden_by_modules() -> None:
    import autoplace
    import autoplace.train.loop  # binds a submodule over the function's name, were it let

    for name in autoplace.__all__:
        assert hasattr(autoplace, name), name
    assert callable(autoplace.train)
    assert set(autoplace._HOME_OF) | {"__version__"} == set(autoplace.__all__)


def test_a_start_up_imports_without_looking_for_garbage() -> None:
    code = """
import gc, sys
runs = []
gc.callbacks.append(lambda phase, info: runs.append(phase))
from autoplace.importing import load
runs.clear()
load("autoplace.train.learner_process")
during = len(runs)
sys.exit(during if gc.isenabled() else "the collector stays off")
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
