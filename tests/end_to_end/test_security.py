"""What a sweep never does: talk to anybody but itself, read what can execute, write what the environment hides."""

import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import wandb

from pipebench.tracking.wandb_environment import SEEN

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("model=mlp", "model.layers=2", "model.width=8", "batch=4", "steps=2", "warmup=1", "partition=uniform")
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
LISTENING = "0A"

SECRET = "a-secret-value-that-must-not-be-written"
SECRET_VARIABLES = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_API_KEY", "AZURE_CLIENT_SECRET", "AZURE_STORAGE_KEY", "AZURE_STORAGE_CONNECTION_STRING", "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GITHUB_TOKEN", "GH_TOKEN", "GITLAB_TOKEN",
    "CI_JOB_TOKEN", "SLURM_JWT", "KUBE_TOKEN", "DOCKER_PASSWORD", "NPM_TOKEN", "PYPI_TOKEN", "DATABASE_URL",
    "SSH_AUTH_SOCK", "SECRET_OF_NO_KNOWN_NAME", "LOGNAME", "USER",
)  # fmt: skip
WANDB_SPELLINGS = {
    "app_url_override": "WANDB_APP_URL", "root_dir": "WANDB_DIR", "run_name": "WANDB_NAME", "run_notes": "WANDB_NOTES",
    "run_tags": "WANDB_TAGS", "run_job_type": "WANDB_JOB_TYPE", "x_graphql_timeout_seconds": "WANDB_HTTP_TIMEOUT",
    "x_file_transfer_timeout_seconds": "WANDB_FILE_PUSHER_TIMEOUT", "email": "WANDB_USER_EMAIL",
}  # fmt: skip
"""Settings of wandb that have a variable besides the one named after them."""

WELL_FORMED = {
    # A value in the wrong form would be refused at once, and never reach what might write it.
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "WANDB_BASE_URL": f"http://127.0.0.1:9/{SECRET}-base",
    "WANDB_APP_URL": f"http://127.0.0.1:9/{SECRET}-app",
    "WANDB_HTTP_PROXY": f"http://{SECRET}-proxy@127.0.0.1:9",
    "WANDB_HTTPS_PROXY": f"http://{SECRET}-proxies@127.0.0.1:9",
    "WANDB_X_EXTRA_HTTP_HEADERS": f'{{"X-Key": "{SECRET}-header"}}',
    "WANDB_INSECURE_DISABLE_SSL": "true",
    "WANDB_HTTP_TIMEOUT": "29",
    "WANDB_ERROR_REPORTING": "false",
}
NO_SECRET = {"WANDB_INSECURE_DISABLE_SSL", "WANDB_HTTP_TIMEOUT", "WANDB_ERROR_REPORTING"}
"""Two letters are found in any file."""


def wandb_variables(folder: Path) -> dict[str, str]:
    """Return a value for every variable that wandb takes a setting from, and for the others that it reads."""
    fields = list(wandb.Settings.model_fields)
    names = {f"WANDB_{field.upper()}" for field in fields} | {f"WANDB__{field[2:].upper()}" for field in fields}
    read = {value for value in vars(wandb.env).values() if isinstance(value, str) and value.startswith("WANDB_")}
    values = {name: f"{SECRET}-{name}" for name in {*names, *WANDB_SPELLINGS.values(), *read, "WANDB_CONFIG"}}
    paths = {name: str(folder / f"{SECRET}-{name}") for name in SEEN if name.endswith(("_DIR", "_FILE"))}
    paths.pop("WANDB_IDENTITY_TOKEN_FILE")  # wandb ends at once where that stands beside a key
    values.pop("WANDB_IDENTITY_TOKEN_FILE")
    return {**values, **paths, **WELL_FORMED}


def start(*arguments: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return subprocess.Popen(
        [sys.executable, "-m", "pipebench", *arguments],
        cwd=folder, env={**kept, "PYTHONPATH": str(ROOT), **variables}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def sockets_of(process: psutil.Process) -> set[str]:
    """Return the inodes of the sockets that a process and all below it hold; who is gone meanwhile holds none."""
    inodes = set()
    for each in [process, *process.children(recursive=True)]:
        folder = Path(f"/proc/{each.pid}/fd")
        for descriptor in os.listdir(folder) if folder.exists() else ():
            try:
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(folder / descriptor))
            except OSError:
                continue
            inodes.update([match[1]] if match else [])
    return inodes


def internet_sockets() -> Iterator[tuple[str, str, str, str]]:
    """Yield (inode, local address, remote address, state) of every TCP and UDP socket in the kernel's tables."""
    for table in ("tcp", "tcp6", "udp", "udp6"):
        path = Path("/proc/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            cells = line.split()
            yield cells[9], cells[1].partition(":")[0], cells[2].partition(":")[0], cells[3]


def test_no_socket_of_a_sweep_has_an_address_but_loopback(tmp_path: Path) -> None:
    process = start("stages=2", "micro=4", *SMALL, "steps=200", "wandb.mode=offline", folder=tmp_path)
    watched, seen = psutil.Process(process.pid), set()
    while process.poll() is None:
        try:
            ours = sockets_of(watched)
        except psutil.NoSuchProcess:
            break
        seen |= {found for found in internet_sockets() if found[0] in ours}
        time.sleep(0.02)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert seen, "two stages find each other by TCP: without a socket, nothing was looked at"
    for inode, local, remote, state in seen:
        assert local in LOOPBACK, f"socket {inode} in state {state} is bound to {local}"
        assert state == LISTENING or remote in LOOPBACK or not remote.strip("0"), f"it is connected to {remote}"


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


def test_no_variable_of_the_environment_reaches_a_file(tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    of_wandb = wandb_variables(elsewhere)
    secrets = {name: f"{SECRET}-{number:02}" for number, name in enumerate(SECRET_VARIABLES)} | of_wandb
    (tmp_path / "sweeps").mkdir()
    process = start(
        "-m", "stages=1,2", "micro=2", *SMALL, "trackers=[wandb,tensorboard]", "wandb.mode=offline",
        folder=tmp_path / "sweeps", HOME=str(home), **secrets,
    )  # fmt: skip
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    files = files_of(tmp_path)
    assert {"result.json", "results.csv", "report.html"} <= {path.name for path in files}
    assert any(path.suffix == ".wandb" for path in files), output
    assert any("tensorboard" in path.parts for path in files)
    contents = {str(path.relative_to(tmp_path)): path.read_bytes() for path in files}
    searched = {name: value.encode() for name, value in secrets.items() if name not in NO_SECRET}
    found = [(name, path) for name, value in searched.items() for path in contents if value in contents[path]]
    assert found == []
    assert [path for path in contents if SECRET in path and not path.startswith("elsewhere")] == []
    assert SECRET not in output


def test_the_readme_names_the_variables_of_wandb_that_it_sees() -> None:
    [sentence] = re.findall(r"W&B sees (.*?)\.\n", (ROOT / "README.md").read_text(), re.DOTALL)
    assert set(re.findall(r"WANDB_[A-Z_]+", sentence)) == SEEN


MODULES = sorted((ROOT / "pipebench").rglob("*.py"))
EXECUTING = {
    "pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "torch.load", "yaml.load",
    "yaml.unsafe_load", "yaml.full_load", "eval", "exec", "compile", "os.system", "os.popen", "runpy",
    "numpy.load", "np.load", "pandas.read_pickle", "pd.read_pickle", "__import__",
}  # fmt: skip
"""What executes, or may, what it is given."""


def names_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every module imported and every dotted name called, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module), node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call):
            yield ast.unparse(node.func), node.lineno


def offences(source: str) -> list[str]:
    return [f"line {line}: {name}" for name, line in names_in(ast.parse(source)) if name in EXECUTING]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_reads_what_can_execute(path: Path) -> None:
    assert offences(path.read_text()) == []


@pytest.mark.parametrize(
    "source", ["import pickle", "from torch import load", "import torch\ntorch.load('x')", "eval('1')"]
)
def test_reading_what_can_execute_would_be_found(source: str) -> None:
    assert len(offences(source)) == 1


def test_only_the_pipes_to_our_own_workers_carry_objects() -> None:
    """multiprocessing pickles what goes through its pipes; nobody else may open one, and it makes no listener.

    The command line and the hang report look at processes alone.
    """
    users = {
        str(path.relative_to(ROOT / "pipebench"))
        for path in MODULES
        for name, _ in names_in(ast.parse(path.read_text()))
        if name.partition(".")[0] == "multiprocessing"
    }
    assert users == {"cli.py", "harness/hang.py", "harness/launch.py", "perf/targets.py", "temporary.py"}
    calls = {name for name, _ in names_in(ast.parse((ROOT / "pipebench/harness/launch.py").read_text()))}
    assert not calls & {"Listener", "Client", "mp.Manager", "multiprocessing.connection.Listener"}
