"""The README and the pages under docs/: their examples run, their tables are complete, their links lead somewhere."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from bench.measure import launch
from bench.tracing import PAIR, PICTURE, Event, record_here, svg
from torch.distributed import fsdp

from ragged_shard.testing import run_ranks

ROOT = Path(__file__).parent.parent
ORDER = ["layout-planner", "ragged-shard", "dbuffer", "block-optim", "fsdp-runtime"]  # of installation
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def examples(page):
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def named(page):
    """Words in code quotes, those of lists and calls one by one."""
    text = re.sub(r"^```.*?^```$", "", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", text))))


def run_page(name, code):
    assert dist.is_initialized()
    namespace = {"__name__": name}
    exec(compile(code, name, "exec"), namespace)
    drawn = namespace.get("drawn", {})
    return {title: layout.to_svg() for title, layout in drawn.items()}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if examples(page)], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_the_examples_of_a_page_run_one_after_another_as_one_script(page):
    for drawn in run_ranks(2, run_page, page.name, "\n".join(examples(page))):
        for name, picture in drawn.items():
            assert (DOCS / "assets" / f"{name}.svg").read_text() == picture, f"{name}.svg is out of date"


@pytest.mark.long
def test_the_first_example_runs_as_the_command_above_it_says(tmp_path):
    page = ROOT / "README.md"
    (command,) = re.findall(r"^torchrun (.*) example.py$", page.read_text(), re.MULTILINE)
    (tmp_path / "example.py").write_text("\n".join(examples(page)))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", *command.split()]
    done = subprocess.run(
        [*launcher, str(tmp_path / "example.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_first_command_installs_all_packages():
    text = (ROOT / "README.md").read_text()
    assert re.findall(r"^pip install (.*)$", text, re.MULTILINE) == ["-r requirements.txt"]


def test_the_manifests_of_the_launch_page_are_valid_yaml_and_its_scripts_valid_shell():
    yaml = pytest.importorskip("yaml")  # not on GPU machines, where this file is collected
    text = (DOCS / "guides/launch.md").read_text()
    manifests = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len([yaml.safe_load(manifest) for manifest in manifests]) == 3
    for script in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.long
def test_the_schedule_of_the_page_on_a_step_is_the_one_recorded():
    timelines = {name: launch(record_here, 1, {"system": name}) for name in PAIR}
    assert svg(timelines) == PICTURE.read_text()  # else: python -m bench timeline --write
    assert all(
        [event for event in events if event.kind == "forward"] == [Event("forward", n) for n in range(3)]
        for events in timelines.values()
    )


def test_the_page_on_fsdp2_has_every_argument_and_every_method():
    methods = {name for name, value in vars(fsdp.FSDPModule).items() if inspect.isfunction(value)}
    methods -= {"__new__", "_get_fsdp_state", "_apply"}  # asked by torch's own functions; `to` and its kind
    policy = inspect.signature(fsdp.MixedPrecisionPolicy).parameters
    wanted = methods | set(inspect.signature(fsdp.fully_shard).parameters) | set(policy)
    assert wanted - named("moving/fsdp2.md") == set()


def test_the_page_on_fsdp1_has_every_argument_method_and_state_dict_type():
    whole = fsdp.FullyShardedDataParallel
    methods = {name for name in vars(whole) if not name.startswith("_")} - {"forward", "module"}
    methods -= {name for name in methods if not callable(getattr(whole, name))}
    wanted = methods | set(inspect.signature(whole).parameters)
    wanted |= set(inspect.signature(fsdp.MixedPrecision).parameters)
    wanted |= {kind.name for kind in fsdp.StateDictType} | {kind.name for kind in fsdp.ShardingStrategy}
    wanted |= {name for name in fsdp.__all__ if name.endswith("StateDictConfig")} - {
        "StateDictConfig",
        "OptimStateDictConfig",
    }
    assert wanted - named("moving/fsdp1.md") == set()


@pytest.mark.parametrize("package", ORDER)
def test_the_api_page_has_every_public_name(package):
    name_of_module = package.replace("-", "_")
    module, page = importlib.import_module(name_of_module), f"api/{package}.md"
    listed = re.findall(rf"^::: {name_of_module}\.(\w+)$", (DOCS / page).read_text(), re.MULTILINE)
    assert [name for name in listed if listed.count(name) > 1] == []
    shown = set(listed)
    assert set(module.__all__) - shown - named(page) == set()  # torch's own are named without a docstring
    for name in shown:
        assert hasattr(module, name) or importlib.import_module(f"{name_of_module}.{name}"), name


@pytest.mark.parametrize("namespace", ["checkpoint", "memory", "quantization"])
def test_the_api_page_has_every_name_of_a_namespace(namespace):
    module = importlib.import_module(f"fsdp_runtime.{namespace}")
    text = (DOCS / "api/fsdp-runtime.md").read_text()
    for name in module.__all__:
        assert re.search(rf"^::: fsdp_runtime\.({namespace}\.)?{name}$", text, re.MULTILINE), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_files_lead_to_what_is_in_the_checkout(page):
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^()\s#]+)(?:#[\w-]+)?\)", prose):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).resolve().exists(), target


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} <= listed


def test_every_message_on_the_troubleshooting_page_is_in_a_source_file():
    trees = [ast.parse(path.read_text()) for path in ROOT.glob("packages/*/src/**/*.py")]
    constants = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    strings = "\n".join(value for value in constants if isinstance(value, str))
    entries = re.findall(r"^#### `(.*)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    fragments = [part.strip(" :;,()") for entry in entries for part in entry.split("…")]
    assert len(entries) > 20
    assert [part for part in fragments if len(part) >= 12 and part not in strings] == []
