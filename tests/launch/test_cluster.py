"""The files for clusters, as far as a machine without one can hold them: their commands are run, with the cluster's parts replaced."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import yaml
from commands import ENVIRONMENT, ROOT

LAUNCH = ROOT / "launch"
SBATCH = LAUNCH / "slurm" / "train.sbatch"
DOCKERFILE = LAUNCH / "docker" / "Dockerfile.rocm"
BIN = pathlib.Path(sys.executable).parent  # holds the `python` that the files call
SRUN = '#!/usr/bin/env bash\n[[ "$1" == --cpu-bind=none ]] && shift && exec "$@"\n'


def shell(*command, cwd=ROOT, **variables):
    """Run bash with our Python first on the path."""
    environment = ENVIRONMENT | {"PATH": f"{BIN}:{os.environ['PATH']}"} | variables
    return subprocess.run(["bash", *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def submit(tmp_path):
    """`submit(*arguments, **variables)`: what SLURM does with the job, from a checkout of which .venv is a part."""
    for name in ("launch", "experiments", "rstar_jax"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN)
    (tmp_path / "bin" / "srun").chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text(f'export PATH="{tmp_path}/bin:{BIN}:$PATH"\n')

    def run(*arguments, **variables):
        return shell(str(SBATCH), *arguments, cwd="/", SLURM_SUBMIT_DIR=str(tmp_path), **variables)

    return run


def test_the_batch_script_is_bash_and_asks_for_one_process_on_one_node_of_eight():
    assert shell("-n", str(SBATCH)).returncode == 0
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in SBATCH.read_text().splitlines() if "#SBATCH --" in line
    )
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("1", "1", "8")


def test_the_batch_script_starts_the_run_that_it_is_given(submit):
    done = submit("quickstart", "/runs/quickstart", "--set", "seed=7", "--dry_run", SLURM_JOB_NUM_NODES="1")
    assert done.returncode == 0, done.stderr
    config = json.loads(done.stdout)
    assert config["seed"] == 7
    assert config["mesh"] == {"data": 1, "fsdp": -1, "expert": 1, "context": 1, "tensor": 1}


def test_the_batch_script_stops_at_a_preset_that_is_refused(submit, tmp_path):
    (tmp_path / "own.env").write_text("XLA_FLAGS=--xla_made_up=1\n")
    done = submit("quickstart", "/runs/quickstart", "--dry_run", PRESET=str(tmp_path / "own.env"))
    assert done.returncode == 2 and done.stdout == ""
    assert "does not know: --xla_made_up=1" in done.stderr


def test_the_batch_script_refuses_several_nodes_and_missing_arguments(submit):
    several = submit("quickstart", "/runs/quickstart", SLURM_JOB_NUM_NODES="8")
    assert several.returncode == 2 and several.stderr.startswith("error: launch.train runs on one node; on 8 each")
    assert "usage: sbatch" in submit("quickstart").stderr


def job_set():
    return yaml.safe_load((LAUNCH / "kubernetes" / "train.yaml").read_text())


def test_the_job_set_is_one_pod_with_eight_gpus_and_shared_memory():
    jobs = job_set()
    assert (jobs["apiVersion"], jobs["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = jobs["spec"]["replicatedJobs"]
    assert (job["replicas"], job["template"]["spec"]["parallelism"], job["template"]["spec"]["completions"]) == (1, 1, 1)
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["amd.com/gpu"] == 8
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    workdir = next(a.partition("=")[2] for a in container["args"] if a.startswith("--workdir="))
    assert any(workdir.startswith(path) and "persistentVolumeClaim" in volume for path, volume in mounts.items())


def test_the_command_of_the_pod_starts_its_run():
    container = job_set()["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    program, *command = container["command"]
    assert program == "bash"
    assert not re.search(r"\$\(", " ".join(command))  # Kubernetes has its own meaning for it
    done = shell(*command, *container["args"], "--dry_run")
    assert done.returncode == 0, done.stderr
    config = json.loads(done.stdout)
    assert (config["name"], config["mesh"]["fsdp"]) == ("quickstart", -1)


def test_the_container_is_rocm_7_with_the_pins_the_extra_and_what_the_programs_read():
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    assert re.search(r"^FROM rocm/dev-ubuntu-\S+:7\.\S+-complete$", text, re.MULTILINE)
    assert re.search(r"^RUN pip install .*--requirement requirements.txt --editable '\.\[rocm\]'$", text, re.MULTILINE)
    copied = [source for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for source in line.split()[:-1]]
    assert {"requirements.txt", "setup.py", "pyproject.toml", "rstar_jax", "experiments", "launch"} <= set(copied)
    assert all((ROOT / source).exists() for source in copied)
    assert f"--file {DOCKERFILE.relative_to(ROOT)}" in text
