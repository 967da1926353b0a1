# SPDX-License-Identifier: Apache-2.0
"""The arms of the benchmark that need one model and one card. Each takes a Session and adds to its figures.

Within a round things that are compared follow each other at once, in an order that turns from round to round, so that a
drift of the machine falls on both.
"""
import contextlib
import time

from bench_files import GIB, KIB, MIB, SPARSE_EVERY, SPARSE_PAGE, Trouble, file_hash, tensor_sizes
from bench_rig import Absent

# Up to here every byte is read back and hashed; beyond, the page of each 2 MiB that is not zero, and the daemon's
# `verify` compares the rest.
WHOLE_HASH_BYTES = GIB
FREE_PATIENCE_SECONDS = 10
MODEL = "bench"
COLD, JUST_TRIMMED = "cold pool", "cold pool just trimmed"
# The driver scrubs what it was given back, on the engines that copy: it slows the copies that follow at once, and those
# that follow two seconds later not at all.
SCRUB_SECONDS = 2


class Session:
    """A daemon with one model of one size, registered, inactive."""

    def __init__(self, rig, results, size, cell_bytes):
        self.rig, self.results, self.size, self.cell_bytes = rig, results, size, cell_bytes
        self.path = rig.checkpoint(f"model-{size}", size)

    def __enter__(self):
        self.enter_daemon(None)
        return self

    def enter_daemon(self, pool_idle):
        flags = {"cell_bytes": self.cell_bytes} | ({"pool_idle": pool_idle} if pool_idle else {})
        self.daemon = self.rig.daemon(**flags)
        try:
            self.registered = self.daemon.register(MODEL, self.path)
            self.client = self.daemon.client()
            self.plain = self.rig.plain_copy()
            self.plain.seconds(self.size)
        except BaseException as error:
            self.daemon.__exit__(type(error), error, None)
            raise

    def __exit__(self, kind, error, trace):
        self.daemon.__exit__(kind, error, trace)
        # Its pages go from the page cache with it.
        self.path.unlink()

    @contextlib.contextmanager
    def cold_pool(self):
        """Inside, empty_pool() empties the pool. Without the command `trim` that takes another daemon."""
        if self.rig.has("trim"):
            yield
            return
        for pool_idle in ("0s", None):
            self.daemon.__exit__(None, None, None)
            self.enter_daemon(pool_idle)
            if pool_idle:
                yield

    def rounds(self):
        return Rounds(self.rig.options.runs, self.rig.options.arm_seconds)

    def activate(self, verify=True):
        answer = self.client.ask("activate", model=MODEL, verify=verify)
        response = answer["response"]
        if response["bytes_moved"] < self.size or (response["verified_cells"] > 0) != verify:
            raise Trouble(f"an activation of {self.size} bytes, verify {verify}, answered {response}")
        return answer

    def deactivate(self):
        answer = self.client.ask("deactivate", model=MODEL)
        if answer["response"]["copied_bytes"]:
            raise Trouble(f"a deactivation copied to the host: {answer['response']}")
        return answer

    def empty_pool(self):
        self.daemon.empty_pool(self.client)

    def can_skip_verification(self):
        try:
            self.activate(verify=False)
        except Absent as absent:
            self.results.skip(absent)
            return False
        self.deactivate()
        return True

    def recover(self):
        """After an arm, which may have broken off: nobody attached, the model inactive."""
        for client in self.daemon.clients[:]:
            if client is not self.client:
                self.daemon.end_client(client)
        with contextlib.suppress(Trouble):
            self.client.ask("deactivate", model=MODEL)

    def check_contents(self):
        """The model is active."""
        check_contents(self.results, self.daemon, MODEL, self.path, self.size)


class Rounds:
    """Numbers of rounds, until there are enough or the time is up: then fewer, which the table shows as n."""

    def __init__(self, most, seconds):
        self.most, self.seconds = most, seconds

    def __iter__(self):
        start = time.monotonic()
        longest = 0
        for number in range(self.most):
            began = time.monotonic()
            if number and began - start + longest > self.seconds:
                return
            yield number
            longest = max(longest, time.monotonic() - began)


def check_contents(results, daemon, model, path, size):
    whole = size <= WHOLE_HASH_BYTES
    every, count = (MIB, MIB) if whole else (SPARSE_EVERY, SPARSE_PAGE)
    client = daemon.client()
    client.ask("attach", model=model)
    found = client.ask("hash", every=every, bytes=count)["sha256"]
    client.ask("detach")
    verified = client.ask("verify", model=model)["response"]
    daemon.end_client(client)
    read = "all bytes" if whole else f"{SPARSE_PAGE // KIB} KiB of each {SPARSE_EVERY // MIB} MiB"
    results.check(f"{model}: SHA-256 of {read}, read back by a client, is the file's",
                  found == file_hash(path, every, count))
    results.check(f"{model}: verify compares {verified['verified_cells']} cells and finds none wrong",
                  verified["verified_cells"] > 0 and verified["refilled_cells"] == 0 == verified["absent_cells"])


def activate(session):
    kinds = [False, True] if session.can_skip_verification() else [True]
    session.activate()
    session.check_contents()
    session.deactivate()
    activate_rounds(session, "warm pool", "idle", kinds)
    with session.rig.busy_client() as rate:
        activate_rounds(session, "warm pool", "busy", kinds)
    session.results.check(f"the busy client read {rate[0] / 1e12:.2f} TB/s, to the end", rate[0] > 0)
    with session.cold_pool():
        activate_rounds(session, COLD, "idle", kinds)
        activate_rounds(session, JUST_TRIMMED, "idle", kinds)
    attached_rounds(session)


def activate_rounds(session, pool, card, kinds):
    """A round is one activation of each kind, with a plain copy between them."""
    results = session.results
    for number in session.rounds():
        steps = kinds if number % 2 == 0 else kinds[::-1]
        answers = {}
        for step, verify in enumerate(steps):
            if pool != "warm pool":
                session.empty_pool()
            if pool == COLD:
                time.sleep(SCRUB_SECONDS)
            answers[verify] = session.activate(verify)
            if step == 0:
                plain = session.plain.seconds(session.size)
            session.deactivate()
        for verify, answer in answers.items():
            figure = f"{pool}, {'verified' if verify else 'unverified'}, {card}"
            results.add(figure, answer["response"]["seconds"], {"plain copy": plain})
            results.add(f"{figure}: as the client sees it", answer["seconds"], {"plain copy": plain})


def attached_rounds(session):
    """A client that attaches to an inactive model: all of it on the card, mapped, and in use."""
    client = session.daemon.client(context=True)
    for _ in session.rounds():
        plain = session.plain.seconds(session.size)
        answer = client.ask("attach", model=MODEL)
        client.ask("detach")
        session.deactivate()
        session.results.add("warm pool, verified: attach, until its first use", answer["seconds"],
                            {"plain copy": plain})
    session.daemon.end_client(client)


def deactivate(session):
    results = session.results
    # The other's memory stands beside the model's, which two of 64 GiB and the contexts would not leave room for.
    torch = optional(session, lambda: session.rig.torch()) if session.size <= 32 * GIB else None
    sizes = tensor_sizes(session.size)
    with session.cold_pool():
        for number in session.rounds():
            beside = {}
            if torch is not None:
                torch.ask("fill", sizes=sizes)
                beside["torch empty_cache"] = torch.ask("empty_cache")["seconds"]
            held = session.activate()["response"]["device_bytes"]
            free = session.plain.free_bytes()
            start = time.monotonic()
            answer = session.deactivate()
            session.empty_pool()
            while session.plain.free_bytes() < free + held:
                if time.monotonic() > start + FREE_PATIENCE_SECONDS:
                    raise Trouble(f"the driver has not {held} bytes more free after a deactivation")
            freed = time.monotonic() - start
            results.add("deactivate, into the pool", answer["response"]["seconds"], beside)
            results.add("deactivate, as the client sees it", answer["seconds"], beside)
            results.add("deactivate, and trim until the driver has all of it", freed, beside)
            if session.rig.has("trim"):
                results.add("trim of an empty pool, as a process", session.daemon.trim())
            if number == 0:
                left = answer["response"]["pooled_bytes"] + answer["response"].get("freed_bytes", 0)
                results.check(f"{held} bytes were on the card, {left} left it by a deactivation, 0 were copied",
                              held == left)
                results.check(f"the driver's free figure rose by all of {held} bytes", True)
    clients = [session.daemon.client(context=True) for _ in range(2)]
    session.activate()
    for client in clients:
        client.ask("attach", model=MODEL)
    for _ in session.rounds():
        answer = session.deactivate()
        results.add("deactivate, with two clients", answer["seconds"])
        session.activate()
    for client in clients:
        session.daemon.end_client(client)
    session.deactivate()


def optional(session, make):
    try:
        return make()
    except Absent as absent:
        session.results.skip(absent)
        return None


def verify(session):
    session.activate()
    for _ in session.rounds():
        answer = session.client.ask("verify", model=MODEL)
        session.results.add("verify", answer["response"]["seconds"])
        session.results.add("verify, as the client sees it", answer["seconds"])
    session.check_contents()
    session.deactivate()


class Ipc:
    """CUDA IPC of as many bytes in as many tensors, from one torch process to another."""

    def __init__(self, session):
        self.giver, self.taker = session.rig.torch("a"), session.rig.torch("b")
        self.taker.ask("context")
        try:
            self.giver.ask("fill", sizes=tensor_sizes(session.size))
        except Absent:
            self.giver.ask("drop")
            raise
        self.seconds()

    def seconds(self):
        seconds = self.taker.ask("rebuild", handles=self.giver.ask("share")["handles"])["seconds"]
        self.taker.ask("drop")
        return seconds

    def close(self):
        self.giver.ask("drop")


def attach(session):
    results = session.results
    session.activate()
    session.check_contents()
    clients = [session.daemon.client(context=True) for _ in range(8)]
    for client in clients:
        client.ask("attach", model=MODEL)
        client.ask("detach")
    clients[0].ask("attach", model=MODEL)
    ipc = optional(session, lambda: Ipc(session))
    for place in (2, 3, 8):
        for client in clients[1:place - 1]:
            client.ask("attach", model=MODEL)
        attach_rounds(session, f"as client {place}", clients[place - 1], ipc)
    for client in clients:
        client.ask("detach")
    for _ in session.rounds():
        one = clients[-1].ask("attach", model=MODEL)["seconds"]
        clients[-1].ask("detach")
        for client in clients:
            client.begin("attach", model=MODEL)
        together = max([client.end()["seconds"] for client in clients])
        results.add("8 at once, the last one", together, {"8 x one": 8 * one})
        for client in clients:
            client.ask("detach")
    if ipc is not None:
        ipc.close()
    for client in clients:
        session.daemon.end_client(client)
    session.deactivate()


def attach_rounds(session, figure, client, ipc):
    added = []
    for number in session.rounds():
        free = session.plain.free_bytes()
        answer = client.ask("attach", model=MODEL)
        added.append(free - session.plain.free_bytes())
        session.results.add("detach", client.ask("detach")["seconds"])
        connecting = client.ask("attach", model=MODEL, connect=True)
        client.ask("detach")
        beside = {} if ipc is None else {"CUDA IPC": ipc.seconds()}
        session.results.add(figure, answer["seconds"], beside)
        session.results.add(f"{figure}, connecting too", connecting["seconds"], beside)
    # Page tables may grow by some MiB; weights would be all of it.
    session.results.check(f"{figure}: {max(added)} bytes more on the card", max(added) < session.size / 100)


def peers(session):
    """The same weights by PyTorch: from page-locked tensors, and from the file."""
    results, torch = session.results, session.rig.torch()
    torch.ask("pin", sizes=tensor_sizes(session.size))
    torch.ask("copy")
    torch.ask("empty_cache")
    session.activate()
    session.check_contents()
    session.deactivate()
    for number in session.rounds():
        plain = session.plain.seconds(session.size)
        copied = torch.ask("copy")["seconds"]
        emptied = torch.ask("empty_cache")["seconds"]
        activated = session.activate()
        deactivated = session.deactivate()
        results.add("torch: page-locked tensors to the card", copied, {"plain copy": plain})
        results.add("torch: empty_cache", emptied)
        results.add("activate, verified", activated["response"]["seconds"],
                    {"plain copy": plain, "torch page-locked": copied})
        results.add("activate, verified: as the client sees it", activated["seconds"], {"torch page-locked": copied})
        results.add("deactivate, as the client sees it", deactivated["seconds"], {"torch empty_cache": emptied})
    torch.ask("unpin")
    torch.ask("load_file", path=str(session.path))
    for number in session.rounds():
        loaded = torch.ask("load_file", path=str(session.path))["seconds"]
        activated = session.activate()["seconds"]
        plain = session.plain.seconds(session.size)
        session.deactivate()
        results.add("torch: load_file, page cache warm", loaded, {"plain copy": plain})
        results.add("activate: as the client sees it, beside load_file", activated, {"load_file": loaded})


SESSION_ARMS = {"activate": activate, "deactivate": deactivate, "verify": verify, "attach": attach, "peers": peers}
