# SPDX-License-Identifier: Apache-2.0
"""What a PyTorch user does instead, in a process of its own; gpu_bench starts it and tells it what to do.

Answers one line of JSON to each line of JSON. Every time is taken by the host's clock between two synchronizations.
"""
import base64
import gc
import json
import mmap
import pickle
import sys
import time

import torch
from safetensors.torch import load_file
from torch.multiprocessing import reductions


class Peer:
    def __init__(self):
        self.pinned = []
        self.on_device = []
        self.memory = None

    def timed(self, work):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def hello(self):
        return {"torch": torch.__version__}

    def context(self):
        torch.zeros(1, device="cuda").sum().item()
        return {}

    def pin(self, sizes):
        """Page-locked tensors. In huge pages of one block and registered, as pin_memory() of each takes 30 s for 32 GiB
        on a virtual machine and rounds each up to a power of two; a copy from either runs at the same rate."""
        self.memory = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        whole.view(-1, 2 << 20).copy_(torch.randint(0, 256, (2 << 20,), dtype=torch.uint8))
        error = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), sum(sizes), 0)
        if int(error) != 0:
            raise RuntimeError(f"cudaHostRegister: {error}")
        self.pinned = list(torch.split(whole, sizes))
        if not self.pinned[0].is_pinned():
            raise RuntimeError("torch does not take registered memory for pinned")
        return {}

    def unpin(self):
        self.drop()
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.pinned[0].data_ptr())
        self.pinned = []
        self.memory = None
        gc.collect()
        return {}

    def copy(self):
        """Into memory that torch has to get from the driver, as after empty_cache()."""
        self.drop()

        def work():
            self.on_device = [tensor.to("cuda", non_blocking=True) for tensor in self.pinned]

        return {"seconds": self.timed(work)}

    def fill(self, sizes):
        self.drop()
        self.on_device = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
        torch.cuda.synchronize()
        return {}

    def empty_cache(self):
        """The references are dropped before the time begins: that costs no bytes, and a user need not collect."""
        self.on_device = []
        before = torch.cuda.mem_get_info()[0]
        seconds = self.timed(torch.cuda.empty_cache)
        return {"seconds": seconds, "freed_bytes": torch.cuda.mem_get_info()[0] - before}

    def load_file(self, path):
        self.drop()
        loaded = {}
        seconds = self.timed(lambda: loaded.update(load_file(path, device="cuda")))
        loaded.clear()
        # Whatever still maps the file would keep it in the page cache.
        gc.collect()
        torch.cuda.empty_cache()
        return {"seconds": seconds}

    def share(self):
        handles = [pickle.dumps(reductions.reduce_tensor(tensor)) for tensor in self.on_device]
        return {"handles": [base64.b64encode(handle).decode() for handle in handles]}

    def rebuild(self, handles):
        """Opens what another process shares; the handles have been received and unpacked before the time begins."""
        unpacked = [pickle.loads(base64.b64decode(handle)) for handle in handles]
        free = torch.cuda.mem_get_info()[0]

        def work():
            self.on_device = [function(*arguments) for function, arguments in unpacked]

        seconds = self.timed(work)
        return {"seconds": seconds, "added_bytes": free - torch.cuda.mem_get_info()[0]}

    def drop(self):
        self.on_device = []
        gc.collect()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        return {}


def main():
    peer = Peer()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(peer, command.pop("do"))(**command)
        except Exception as error:  # whatever it is, the one who asked is told, and decides
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
