"""A Slurm cluster of three nodes on this machine: its own munged, controller and slurmds, on free ports, in a folder of
its own. The nodes have eight cores and four GPUs each, as far as Slurm knows."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from birl.process import ProcessGroup

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
NODES = ("n1", "n2", "n3")
SECONDS = 100.0  # longest wait for anything
CONFIG = """
ClusterName=birl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/ctld.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
ReturnToService=2
KillWait=3
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=n1 MaxTime=1 State=UP
"""


def missing() -> bool:
    """Whether Slurm is not here. Where everything is tested, it must be."""
    return not os.environ.get("CI") and any(shutil.which(name) is None for name in PROGRAMS)


@dataclass(kw_only=True)
class Cluster:
    folder: Path
    daemons: dict[str, ProcessGroup] = field(default_factory=dict[str, ProcessGroup])

    def start(self, name: str, *command: str) -> None:
        """It ends with this process, however that ends."""
        self.daemons[name] = ProcessGroup(command, log=self.folder / f"{name}.out", env=os.environ)

    def node(self, name: str) -> None:
        self.start(name, "slurmd", "-D", "-N", name)

    def lose(self, name: str) -> None:
        """A node ends at once, with everything on it. Slurm would notice after SlurmdTimeout, and is told."""
        self.daemons[name].kill()
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                own = (entry / "environ").read_bytes().split(b"\0")
                if {f"SLURMD_NODENAME={name}".encode(), f"SLURM_CONF={self.folder}/slurm.conf".encode()} <= {*own}:
                    os.kill(int(entry.name), signal.SIGKILL)
        self.do("scontrol", "update", f"nodename={name}", "state=down", "reason=lost")

    def said(self) -> str:
        """The ends of all logs, for a failure."""
        files = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files)

    def do(self, *words: str) -> str:
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=SECONDS).stdout

    def job(self, job: str) -> dict[str, str]:
        """What scontrol says of it: JobState, Restarts, ..."""
        words = (word.partition("=") for word in self.do("scontrol", "-o", "show", "job", job).split())
        return {name: value for name, _, value in words}

    def hurry(self) -> None:
        """Slurm lets what was requeued wait until the credentials of its last start are worth nothing: 121 s. They are
        so much earlier, but not within the second in which the nodes were told to end the job."""
        for line in self.do("squeue", "--noheader", "--states=PENDING", "--array", "--format=%i %r").splitlines():
            job, reason = line.split()
            about = self.job(job)
            over = datetime.now() - datetime.fromisoformat(about["SubmitTime"])  # when it was requeued
            if reason == "BeginTime" and about["Restarts"] != "0" and over > timedelta(seconds=2):
                self.do("scontrol", "update", f"jobid={job}", "starttime=now")

    def free(self) -> bool:
        """All nodes are up, and none has anything to do."""
        states = self.do("sinfo", "--noheader", "--Node", "--partition=debug", "--format=%T").split()
        return states == ["idle"] * len(NODES)


def until(what: Callable[[], Any], why: str = "", seconds: float = SECONDS) -> Any:
    """What it gives, once that is true."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {why}"
        time.sleep(0.05)
    return found


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    found = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return found


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Sets SLURM_CONF while it is there."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # not pytest's: a socket's path may have 107 characters
    before = os.environ.get("SLURM_CONF")
    made = Cluster(folder=folder)
    try:
        configure(folder)
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        files = [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("key-file", "pid-file", "log-file")]
        made.start("munged", "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files,
                   f"--seed-file={folder}/munge.seed")  # fmt: skip
        until((folder / "munge.socket").exists, "munged")
        made.start("slurmctld", "slurmctld", "-D", "-c")
        for name in NODES:
            made.node(name)
        try:
            until(lambda: not subprocess.run(["scontrol", "ping"], capture_output=True).returncode and made.free())
        except AssertionError as error:
            raise AssertionError(f"{error}\n{made.said()}") from error
        yield made
        until(lambda: not empty(made), "the last jobs end")
    finally:
        for daemon in reversed(made.daemons.values()):
            daemon.signal(signal.SIGTERM)
        for daemon in made.daemons.values():
            daemon.wait(5)
            daemon.kill()
        os.environ.pop("SLURM_CONF")
        if before is not None:
            os.environ["SLURM_CONF"] = before
        shutil.rmtree(folder, ignore_errors=True)


def empty(made: Cluster) -> str:
    """Ends all jobs; what is left of them."""
    subprocess.run(["scancel", "--quiet", f"--user={getpass.getuser()}"], check=False, timeout=SECONDS)
    return made.do("squeue", "--noheader")


def configure(folder: Path) -> None:
    folder.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host, user = socket.gethostname().partition(".")[0], getpass.getuser()
    port, *ports = free_ports(1 + len(NODES))
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=8000 Gres=gpu:4 "
        "State=UNKNOWN"
        for name, port in zip(NODES, ports, strict=True)
    )
    for number in range(4):
        (folder / f"gpu{number}").symlink_to("/dev/null")  # Slurm wants a device
    (folder / "gres.conf").write_text("".join(f"NodeName={n} Name=gpu File={folder}/gpu[0-3]\n" for n in NODES))
    text = CONFIG.format(host=host, port=port, user=user, folder=folder, nodes=nodes)
    (folder / "slurm.conf").write_text(text)
