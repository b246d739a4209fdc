"""What holds over all five packages: versions, pins, declared imports, what is never called."""

from __future__ import annotations

import ast
import io
import re
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("client", "core", "kernels", "server", "worker")

# Distributions whose top-level module has another name.
MODULE_OF = {
    "huggingface-hub": "huggingface_hub",
    "prometheus-client": "prometheus_client",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
}

# Reading data with one of these can run code that the data brings along.
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "marshal.load",
    "marshal.loads",
    "pickle.load",
    "pickle.loads",
    "torch.load",
    "yaml.load",
}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}

# The only modules of server that run inside the engine process, or in the user's own.
ENGINE_SIDE = {"calibration.py", "cli/doctor.py", "engine_process.py", "llm.py"}
HEAVY = {"torch", "transformers", "octavo_worker", "octavo_kernels"}


def project(package: str) -> dict[str, Any]:
    text = (ROOT / "packages" / package / "pyproject.toml").read_text()
    table: dict[str, Any] = tomllib.loads(text)["project"]
    return table


def source(package: str) -> Path:
    return ROOT / "packages" / package / "src" / f"octavo_{package}"


def version(package: str) -> str:
    text = (source(package) / "__init__.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found is not None, f"octavo_{package} states no version"
    return found[1]


def dependencies(package: str) -> dict[str, str]:
    """Return the name of each declared dependency, of extras too, and its version specifier."""
    found = {}
    extras = project(package).get("optional-dependencies", {})
    for requirement in [*project(package)["dependencies"], *chain(*extras.values())]:
        match = re.fullmatch(r"([a-z0-9-]+)([^;]*)(;.*)?", requirement)
        assert match is not None, f"{package}: {requirement} is not written in lower case"
        found[match[1]] = match[2]
    return found


def third_party() -> set[str]:
    names = {name for package in PACKAGES for name in dependencies(package)}
    return {name for name in names if not name.startswith("octavo-")}


def always_installed() -> set[str]:
    """What comes without any extra."""
    declared = [line for package in PACKAGES for line in project(package)["dependencies"]]
    return {match[0] for line in declared if (match := re.match("[a-z0-9-]+", line))}


def files(package: str) -> list[Path]:
    return sorted(source(package).rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield node.module or ""


def test_the_packages_are_these_five() -> None:
    found = sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))
    assert found == sorted(PACKAGES)
    for package in PACKAGES:
        assert project(package)["name"] == f"octavo-{package}"


def test_import_rules_know_every_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert sorted(settings["root_packages"]) == [f"octavo_{package}" for package in PACKAGES]
    (layers,) = [c["layers"] for c in settings["contracts"] if c["type"] == "layers"]
    layered = [name.strip() for layer in layers for name in layer.split("|")]
    assert sorted(layered) == sorted(settings["root_packages"])


def test_one_version_and_equal_pins() -> None:
    versions = {package: version(package) for package in PACKAGES}
    assert len(set(versions.values())) == 1, versions
    for package in PACKAGES:
        for name, pin in dependencies(package).items():
            if name.startswith("octavo-"):
                assert pin == f"=={versions[package]}", f"{package} needs {name}{pin}"


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_typed_described_and_licensed(package: str) -> None:
    assert (source(package) / "py.typed").exists()
    table = project(package)
    assert (ROOT / "packages" / package / table["readme"]).read_text().strip()
    assert table["license"] == "Apache-2.0"
    assert table["requires-python"] == ">=3.11"


def test_third_party_dependencies_are_few_and_written_down() -> None:
    page = (ROOT / "docs" / "decisions" / "dependencies.md").read_text()
    rows = re.findall(r"^\| ([a-z0-9-]+) \| ([a-z, ]+) \|", page, re.MULTILINE)
    written = {name: set(users.split(", ")) for name, users in rows if name != "dependency"}
    used = {
        name: {package for package in PACKAGES if name in dependencies(package)}
        for name in third_party()
    }
    assert written == used
    assert len(used.keys() & always_installed()) < 25


def test_constraints_pin_only_what_is_needed() -> None:
    text = (ROOT / "constraints" / "cpu.txt").read_text()
    pinned = set(re.findall(r"^([a-z0-9-]+)==", text, re.MULTILINE))
    # Torch's CUDA and ROCm builds choose their own triton.
    assert pinned == third_party() - {"triton"}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_is_declared(package: str) -> None:
    declared = {MODULE_OF.get(name, name.replace("-", "_")) for name in dependencies(package)}
    allowed = declared | {f"octavo_{package}"} | set(sys.stdlib_module_names)
    for path in files(package):
        for module in imported_modules(parse(path)):
            top = module.partition(".")[0]
            assert top in allowed, f"{path.relative_to(ROOT)} imports {module}, not declared"


def test_only_the_triton_kernels_import_triton() -> None:
    """It is there on GPUs only, so all else has to import without it."""
    for package in PACKAGES:
        for path in files(package):
            if path.parent == source("kernels") / "triton":
                continue
            for module in imported_modules(parse(path)):
                assert module.partition(".")[0] != "triton", path.relative_to(ROOT)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_declared_dependency_is_used(package: str) -> None:
    used = {
        module.partition(".")[0]
        for path in files(package)
        for module in imported_modules(parse(path))
    }
    declared = {MODULE_OF.get(name, name.replace("-", "_")) for name in dependencies(package)}
    assert declared <= used, f"{package} never imports {sorted(declared - used)}"


def forbidden(tree: ast.AST) -> Iterator[str]:
    """Yield calls and imports that could run code out of data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in FORBIDDEN_CALLS or called.removeprefix("builtins.") in FORBIDDEN_CALLS:
                yield called
            # numpy.load and the like: unpickling has to be asked for.
            yield from (
                "allow_pickle"
                for keyword in node.keywords
                if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False"
            )
    for module in imported_modules(tree):
        if module.partition(".")[0] in FORBIDDEN_MODULES:
            yield module


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_can_run_code_out_of_data(package: str) -> None:
    for path in files(package):
        assert list(forbidden(parse(path))) == [], path.relative_to(ROOT)


@pytest.mark.parametrize(
    "code",
    [
        "eval(text)",
        "builtins.exec(text)",
        "import pickle",
        "from marshal import loads",
        "torch.load(path)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_that_test_can_fail(code: str) -> None:
    assert list(forbidden(ast.parse(code)))


def test_no_module_of_the_front_imports_torch() -> None:
    for path in files("server"):
        if path.relative_to(source("server")).as_posix() in ENGINE_SIDE:
            continue
        for module in imported_modules(parse(path)):
            top = module.partition(".")[0]
            assert top not in HEAVY, f"{path.relative_to(ROOT)} imports {module}"


def test_core_stays_small() -> None:
    """A wheel is a zip file of the sources and a few lines beside them."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path in sorted(source("core").rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                wheel.write(path, path.relative_to(source("core")))
    assert 10_000 < len(archive.getvalue()) < 300_000 - 10_000


def test_the_readme_states_the_two_commands() -> None:
    """Both stand at the top, on one line each, and bring nox along."""
    top = (ROOT / "README.md").read_text().splitlines()[:25]
    for session in ("serve", "tests"):
        (line,) = [line for line in top if line.endswith(f"nox -s {session}")]
        assert top[top.index(line) - 2] == f"<!-- command: {session} -->"
        assert "pip install -q nox" in line


def test_docs_name_files_that_exist() -> None:
    """A page that names ``octavo_core/scheduler.py`` is wrong once that file is renamed."""
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/*.md")]:
        text = page.read_text()
        for package, rest in re.findall(r"octavo_(\w+)/([\w/]+\.py)", text):
            assert (source(package) / rest).exists(), f"{page.name}: octavo_{package}/{rest}"
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_can_be_found_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for page in ROOT.glob("docs/*.md"):
        assert f"](docs/{page.name})" in readme, page.name
