# SPDX-License-Identifier: Apache-2.0
"""The arms of the benchmark that need a daemon of their own: another budget, several models or cards, other files."""
import time

from bench_arms import Rounds, check_contents, optional
from bench_files import GIB, MIB, evict, warm
from bench_rig import Absent

STATUS_MODELS, STATUS_CELLS_EACH, STATUS_CELL_BYTES = 64, 32, 2 * MIB


class Place:
    """What a session of optional() is to it."""

    def __init__(self, rig, results):
        self.rig, self.results = rig, results


def rounds_of(rig):
    return Rounds(rig.options.runs, rig.options.arm_seconds)


def swap(rig, results, size, cell_bytes):
    """Two models, of which the card takes one: each activation takes the other one off first."""
    paths = {name: rig.checkpoint(f"{name}-{size}", size) for name in ("swap-a", "swap-b")}
    with rig.daemon(cell_bytes=cell_bytes, device_budget=size + size // 4) as daemon:
        for name, path in paths.items():
            daemon.register(name, path)
        client = daemon.client()
        plain = rig.plain_copy()
        plain.seconds(size)
        client.ask("activate", model="swap-a")
        for name in ("swap-b", "swap-a"):
            client.ask("activate", model=name)
            check_contents(results, daemon, name, paths[name], size)
        kinds = [True]
        try:
            client.ask("activate", model="swap-b", verify=False)
            client.ask("activate", model="swap-a")
            kinds.append(False)
        except Absent as absent:
            results.skip(absent)
        swap_rounds(rig, results, client, plain, size, kinds, "")
        # Whoever is attached to the model that goes lets go of its cells, and maps those that come back.
        for name in ("swap-a", "swap-b"):
            client.ask("activate", model=name)
            daemon.client(context=True).ask("attach", model=name)
        swap_rounds(rig, results, client, plain, size, [True], ", an idle client attached to each")
        for name in ("swap-a", "swap-b"):
            client.ask("activate", model=name)
            check_contents(results, daemon, name, paths[name], size)
    for path in paths.values():
        path.unlink()


def swap_rounds(rig, results, client, plain, size, kinds, attached):
    client.ask("activate", model="swap-b")
    coming = "swap-a"
    for number in rounds_of(rig):
        answers = {}
        for step, verify in enumerate(kinds if number % 2 == 0 else kinds[::-1]):
            answers[verify] = client.ask("activate", model=coming, verify=verify)
            evicted = answers[verify]["response"]["evicted"]
            if step == 0:
                copied = plain.seconds(size)
            if len(evicted) != 1:
                results.check(f"{coming} made {evicted} leave, which is not the other one", False)
            coming = "swap-a" if coming == "swap-b" else "swap-b"
        for verify, answer in answers.items():
            figure = f"swap, {'verified' if verify else 'unverified'}{attached}"
            results.add(figure, answer["response"]["seconds"], {"plain copy": copied})
            results.add(f"{figure}: as the client sees it", answer["seconds"], {"plain copy": copied})


def register_and_activate(daemon, client, name, path, *flags):
    start = time.monotonic()
    daemon.register(name, path, *flags)
    client.ask("activate", model=name)
    return time.monotonic() - start


def cold(rig, results, size, cell_bytes):
    """From the disk: nothing of the file is in the page cache when each begins."""
    path = rig.checkpoint(f"dense-{size}", size, dense=True)
    torch = optional(Place(rig, results), rig.torch)
    at_once = ["--activate"] if rig.has("register", "--activate") else []
    with rig.daemon(cell_bytes=cell_bytes) as daemon:
        client = daemon.client()
        plain = rig.plain_copy()

        def ours():
            return register_and_activate(daemon, client, "cold", path, *at_once)

        def evicted(work):
            evict(path)
            return work()

        evicted(ours)
        check_contents(results, daemon, "cold", path, size)
        daemon.ctl("unload", "cold")
        ways = {"ours": ours, "O_DIRECT read": lambda: plain.read_seconds(path)}
        if torch is not None:
            torch.ask("context")
            ways["load_file"] = lambda: torch.ask("load_file", path=str(path))["seconds"]
        for number in rounds_of(rig):
            took = {}
            for name in list(ways) if number % 2 == 0 else list(ways)[::-1]:
                took[name] = evicted(ways[name])
                if name == "ours":
                    daemon.ctl("unload", "cold")
            mine = took.pop("ours")
            results.add("register and activate", mine, took)
            if "load_file" in took:
                results.add("torch: load_file", took["load_file"], {"O_DIRECT read": took["O_DIRECT read"]})
    path.unlink()


def warm_file(rig, results, size, cell_bytes):
    """From the page cache, which the host tier `file` copies from."""
    if not rig.has("register", "--host_tier"):
        raise Absent("this residencyctl cannot register with --host_tier file")
    path = rig.checkpoint(f"dense-{size}", size, dense=True)
    torch = optional(Place(rig, results), rig.torch)
    with rig.daemon(cell_bytes=cell_bytes) as daemon:
        client = daemon.client()
        plain = rig.plain_copy()
        plain.seconds(size)
        warm(path)

        def ours():
            return register_and_activate(daemon, client, "warm", path, "--host_tier", "file")

        ours()
        check_contents(results, daemon, "warm", path, size)
        daemon.ctl("unload", "warm")
        if torch is not None:
            torch.ask("load_file", path=str(path))
        for _ in rounds_of(rig):
            beside = {"plain copy": plain.seconds(size)}
            mine = ours()
            daemon.ctl("unload", "warm")
            if torch is not None:
                beside["load_file"] = torch.ask("load_file", path=str(path))["seconds"]
            results.add("register and activate", mine, beside)
    path.unlink()


def status(rig, results, size, _):
    """Many models and cells; the size given is not used."""
    models = rig.options.status_models
    results.where("status", models * STATUS_CELLS_EACH * STATUS_CELL_BYTES, STATUS_CELL_BYTES)
    # One file under many names: one host copy.
    path = rig.checkpoint("status", STATUS_CELLS_EACH * STATUS_CELL_BYTES)
    with rig.daemon(cell_bytes=STATUS_CELL_BYTES) as daemon:
        client = daemon.client()
        for i in range(models):
            daemon.register(f"status-{i}", path)
            client.ask("activate", model=f"status-{i}")
        answer = client.ask("status")["response"]["status"]
        cells = sum(part["cells_on_gpu"] for model in answer["models"] for part in model["components"])
        results.check(f"status shows {len(answer['models'])} models with {cells} cells on the card",
                      (len(answer["models"]), cells) == (models, models * STATUS_CELLS_EACH))
        for _ in rounds_of(rig):
            answer = client.ask("status")
            measured = sum(device["measured_in_microseconds"] for device in answer["response"]["status"]["devices"])
            results.add(f"status of {models} models, {cells} cells, as the daemon measures", measured / 1e6)
            results.add(f"status of {models} models, {cells} cells, as the client sees it", answer["seconds"])
    path.unlink()


def two_gpus(rig, results, size, cell_bytes):
    """One model on each of two cards, from one host copy: each alone, then both at once."""
    path = rig.checkpoint(f"two-{size}", size)
    with rig.daemon(cell_bytes=cell_bytes) as daemon:
        devices = daemon.ctl("status")["devices"]
        if len(devices) < 2:
            raise Absent("there is one GPU only")
        clients, plains = [], []
        for i in range(2):
            pinned = daemon.register(f"two-{i}", path, "--device", devices[i]["uuid"])["pinned_bytes"]
            clients.append(daemon.client(device=i))
            plains.append(rig.plain_copy(i))
            plains[i].seconds(size)
        host = daemon.ctl("status")["host"]
        results.check(f"{host['pinned_bytes']} bytes of the host are page-locked, for both cards together",
                      host["pinned_bytes"] == pinned)
        for i in range(2):
            clients[i].ask("activate", model=f"two-{i}")
            check_contents(results, daemon, f"two-{i}", path, size)
            clients[i].ask("deactivate", model=f"two-{i}")
        for _ in rounds_of(rig):
            alone, copies_alone = [], []
            for i in range(2):
                copies_alone.append(plains[i].seconds(size))
                alone.append(clients[i].ask("activate", model=f"two-{i}")["response"]["seconds"])
                clients[i].ask("deactivate", model=f"two-{i}")
            for plain in plains:
                plain.send(f"copy {size}")
            copies = [float(plain.receive()) for plain in plains]
            for i in range(2):
                clients[i].begin("activate", model=f"two-{i}")
            both = [client.end()["response"]["seconds"] for client in clients]
            for i in range(2):
                clients[i].ask("deactivate", model=f"two-{i}")
            results.add("plain copies at once, the slower one", max(copies), {"alone": max(copies_alone)})
            results.add("one card alone, the slower one", max(alone), {"plain copy": max(copies_alone)})
            results.add("both cards at once, the slower one", max(both),
                        {"alone": max(alone), "plain copies at once": max(copies)})
    path.unlink()


# With the sizes that each takes where the command line gives it none.
DAEMON_ARMS = {"swap": (swap, None), "cold": (cold, 4 * GIB), "warm_file": (warm_file, 8 * GIB),
               "status": (status, GIB), "two_gpus": (two_gpus, None)}
