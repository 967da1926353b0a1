# SPDX-License-Identifier: Apache-2.0
"""What the benchmark starts: the daemon and the processes beside it. gpu_bench says what for."""
import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from bench_files import GIB, KIB, MIB, Trouble, write_checkpoint

HERE = pathlib.Path(__file__).resolve().parent
START_SECONDS, CALL_SECONDS = 60, 180


class Absent(Exception):
    """What is to be measured is not on this machine or in this build; says what."""


class Lines:
    """A process that answers each line with one line. One that cannot be started is trouble."""

    def __init__(self, command, **options):
        self.command = [str(part) for part in command]
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        bufsize=1, **options)

    def send(self, line):
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Trouble(f"{self.command[0]} has ended: {self.process.wait()}") from None

    def receive(self):
        line = self.process.stdout.readline()
        if not line:
            raise Trouble(f"{self.command[0]} ended with {self.process.wait()}")
        return line.strip()

    def close(self):
        """Returns what it says last."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        last = self.process.stdout.read().strip()
        try:
            self.process.wait(timeout=START_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        return last


class JsonLines(Lines):
    def begin(self, do, **fields):
        self.send(json.dumps({"do": do, **fields}))

    def end(self):
        answer = json.loads(self.receive())
        if "error" in answer:
            wanting = answer["error"].startswith(("UNIMPLEMENTED", "OutOfMemoryError"))
            raise (Absent if wanting else Trouble)(f"{os.path.basename(self.command[0])}: {answer['error']}")
        return answer

    def ask(self, do, **fields):
        self.begin(do, **fields)
        return self.end()


class PlainCopy(Lines):
    """Copies with nothing of ours in between; see plain_copy.cc."""

    def ask(self, line):
        self.send(line)
        answer = self.receive()
        if answer.startswith("error"):
            raise Trouble(f"plain_copy: {line}: {answer}")
        return answer

    def seconds(self, size):
        return float(self.ask(f"copy {size}"))

    def free_bytes(self):
        return int(self.ask("free").split()[0])

    def read_seconds(self, path):
        return float(self.ask(f"read {path}").split()[1])


class Rig:
    """The processes of one run of gpu_bench, and the directories that go with them."""

    def __init__(self, options):
        self.options = options
        self.sim = options.driver == "sim"
        self.programs = pathlib.Path(options.programs)
        self.stack = contextlib.ExitStack()
        # A Unix socket's path has at most 107 bytes.
        parent = "/dev/shm" if os.path.isdir("/dev/shm") else "/tmp"
        self.runtime_dir = self.own(tempfile.mkdtemp(prefix="residency-bench.", dir=parent))
        self.files = pathlib.Path(self.own(tempfile.mkdtemp(prefix="residency-bench.", dir=options.dir)))
        self.plain = {}
        self.torches = {}

    def own(self, directory):
        self.stack.callback(shutil.rmtree, directory, ignore_errors=True)
        return directory

    def close(self):
        self.stack.close()

    def driver_flags(self):
        flags = ["--driver", self.options.driver]
        return flags + ["--sim_link_bytes_per_second", self.options.sim_link] if self.sim else flags

    def daemon(self, **flags):
        return Daemon(self, flags)

    def has(self, command, option=None):
        """Whether residencyctl of this build has a command, and that an option."""
        if command not in self.ctl_help():
            return False
        return option is None or option in self.ctl_help(command)

    @functools.lru_cache(maxsize=None)
    def ctl_help(self, *command):
        done = subprocess.run([self.programs / "client/ctl/residencyctl", *command, "--help"], capture_output=True,
                              text=True, check=True)
        return done.stdout.split()

    def plain_flags(self, device, buffer_bytes):
        flags = self.driver_flags() + ["--device", device, "--buffer_bytes", buffer_bytes]
        return flags + ["--sim_dir", os.path.join(self.runtime_dir, "sim")] if self.sim else flags

    def plain_copy(self, device=0):
        """Kept for the whole run. On simulated cards a daemon must have been there, which decides what they are."""
        if device not in self.plain:
            buffer_bytes = 32 * MIB if self.sim else GIB
            self.plain[device] = PlainCopy([self.programs / "tests/bench/plain_copy",
                                            *self.plain_flags(device, buffer_bytes)])
            self.stack.callback(self.plain[device].close)
        return self.plain[device]

    @contextlib.contextmanager
    def busy_client(self):
        """Another process keeps the card busy meanwhile. Yields a list that gets the bytes a second that it read."""
        busy = Lines([self.programs / "tests/bench/plain_copy", "--busy",
                      *self.plain_flags(0, 2 * MIB if self.sim else 2 * GIB)])
        said, rate = busy.receive(), []
        try:
            if said != "busy":
                raise Trouble(f"plain_copy --busy: {said}")
            yield rate
        finally:
            rate.append(float(busy.close() or 0))

    def start_torch(self):
        """Importing takes 11 to 15 s, beside which other things can be prepared."""
        if importlib.util.find_spec("torch") is None or importlib.util.find_spec("safetensors") is None:
            return
        for name in ("a", "b"):
            self.torches[name] = JsonLines([sys.executable, HERE / "torch_peer.py"])
            self.torches[name].begin("hello")
            self.torches[name].version = None
            self.stack.callback(self.torches[name].close)

    def wait_for_torch(self):
        """Until none of it starts any more, so that nothing is measured beside that; its version, or None."""
        version = None
        for name in list(self.torches):
            with contextlib.suppress(Absent):
                version = self.torch(name).version
        return version

    def torch(self, name="a"):
        if self.sim:
            raise Absent("PyTorch cannot use the simulated driver")
        if name not in self.torches:
            raise Absent("this python3 has no torch and safetensors, or they do not start")
        peer = self.torches[name]
        if peer.version is None:
            try:
                peer.version = peer.end()["torch"]
            except Trouble as trouble:
                del self.torches[name]
                raise Absent(f"PyTorch did not start: {trouble}") from trouble
        return peer

    @staticmethod
    def grow_memory(needed_bytes):
        """A virtual machine may show memory only once it was used; a daemon that measures would refuse the models."""
        with open("/proc/meminfo", encoding="ascii") as file:
            available = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable")) * KIB
        if available >= needed_bytes:
            return
        touch = "import mmap, sys; kept = [mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | " \
                "mmap.MAP_POPULATE) for _ in range(int(sys.argv[1]))]"
        subprocess.run([sys.executable, "-c", touch, str(-(-needed_bytes // GIB))], check=False)

    def checkpoint(self, name, size, dense=False):
        """A file of `size` bytes of weights below the run's directory; different for each name."""
        path = self.files / f"{name}.safetensors"
        write_checkpoint(path, size, name, dense)
        return path


class Daemon:
    """One residencyd. Its name for a flag is the keyword here; a flag with the value None is left out."""

    def __init__(self, rig, flags):
        self.rig = rig
        defaults = {"runtime_dir": rig.runtime_dir, "pool_idle": "1h"}
        if rig.sim:
            # The first daemon decides what the simulated cards are.
            defaults |= {"sim_devices": rig.options.sim_devices, "sim_device_bytes": rig.options.sim_device_bytes,
                         "device_reserve": 0}
        command = [rig.programs / "daemon/residencyd", *rig.driver_flags()]
        command += [f"--{name}={value}" for name, value in (defaults | flags).items() if value is not None]
        self.log = open(os.path.join(rig.runtime_dir, "residencyd.log"), "w+", encoding="utf-8")
        self.process = subprocess.Popen([str(part) for part in command], stdin=subprocess.DEVNULL, stdout=self.log,
                                        stderr=subprocess.STDOUT)
        self.clients = []
        self.wait_until(self.serves, START_SECONDS, "residencyd to serve")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        for client in self.clients:
            client.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(timeout=START_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        broke_off = kind is not None and not issubclass(kind, Absent)
        if broke_off or status != 0:
            sys.stderr.write(f"residencyd ended with {status}; the end of what it wrote:\n{self.log_text()[-4000:]}\n")
        self.log.close()
        if kind is None and status != 0:
            raise Trouble(f"residencyd ended with {status}")

    def log_text(self):
        with open(self.log.name, encoding="utf-8") as file:
            return file.read()

    def serves(self):
        if self.process.poll() is not None:
            raise Trouble(f"residencyd did not start: {self.log_text()}")
        return " serving on " in self.log_text()

    @staticmethod
    def wait_until(condition, seconds, what, pause=0.01):
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise Trouble(f"waited {seconds} s for {what}")
            time.sleep(pause)

    def ctl(self, *command):
        done = subprocess.run([self.rig.programs / "client/ctl/residencyctl", "--json", "--runtime_dir",
                               self.rig.runtime_dir, *map(str, command)], capture_output=True, text=True,
                              timeout=CALL_SECONDS, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            raise Trouble(f"residencyctl {' '.join(map(str, command))}: {done.stderr.strip()}")
        return json.loads(done.stdout) if done.stdout.strip() else {}

    def client(self, device=0, context=False):
        client = JsonLines([self.rig.programs / "tests/bench/bench_client", self.rig.runtime_dir,
                            self.rig.options.driver, device])
        self.clients.append(client)
        if context:
            client.ask("context")
        return client

    def end_client(self, client):
        self.clients.remove(client)
        client.close()

    def register(self, name, path, *flags):
        return self.ctl("register", name, path, "--pin", "yes", *flags)

    def trim(self):
        """Seconds of it, as a process; 0 where there is no such command, and --pool_idle=0s does it."""
        if not self.rig.has("trim"):
            return 0
        start = time.monotonic()
        self.ctl("trim")
        return time.monotonic() - start

    def empty_pool(self, client):
        """Until no cell is left."""
        self.trim()
        self.wait_until(lambda: all(device["pool_idle_bytes"] == 0 for device in
                                    client.ask("status")["response"]["status"]["devices"]),
                        START_SECONDS, "the pool to be empty", 0.001)
