# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of the benchmark: written, hashed, brought into the page cache and out of it."""
import concurrent.futures
import ctypes
import hashlib
import json
import mmap
import os
import random
import time

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# One random page in so many bytes: a page that lands in another place, or in another model, is seen.
SPARSE_EVERY, SPARSE_PAGE = 2 * MIB, 4 * KIB
# As a Llama-shaped checkpoint of bf16 has.
TENSORS_PER_8_GIB = 174
EVICTIONS = 20


class Trouble(Exception):
    """Something did not do what it was asked, so that nothing can be measured."""


def write_checkpoint(path, size, seed, dense):
    """A safetensors file of `size` bytes of weights: sparse with a random page here and there, or random throughout."""
    sizes = tensor_sizes(size)
    header, offset = {}, 0
    for i, count in enumerate(sizes):
        header[f"layers.{i}.weight"] = {"dtype": "BF16", "shape": [count // 2],
                                        "data_offsets": [offset, offset + count]}
        offset += count
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
        file.flush()
        if dense:
            write_dense(file.fileno(), 8 + len(text), size)
        else:
            write_sparse(file.fileno(), 8 + len(text), size, seed)
        os.fsync(file.fileno())


def tensor_sizes(size, tensors=None):
    """Sizes of the tensors, in whole steps of SPARSE_EVERY, as equal as can be."""
    steps = size // SPARSE_EVERY
    count = tensors or max(1, min(steps, round(TENSORS_PER_8_GIB * size / (8 * GIB))))
    return [SPARSE_EVERY * ((i + 1) * steps // count - i * steps // count) for i in range(count)]


def write_sparse(fd, start, size, seed):
    numbers = random.Random(seed)
    for _ in range(size // SPARSE_EVERY):
        os.pwrite(fd, numbers.randbytes(SPARSE_PAGE), start)
        start += SPARSE_EVERY


def write_dense(fd, start, size):
    block = 16 * MIB

    def write(offset):
        os.pwrite(fd, os.urandom(min(block, size - offset)), start + offset)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(0, size, block)))


def file_hash(path, every, count):
    """What bench_client's `hash` must find."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        tensors = [entry["data_offsets"] for entry in json.loads(file.read(length)).values()]
        for begin, end in sorted(tensors):
            for offset in range(begin, end, every):
                file.seek(8 + length + offset)
                total.update(file.read(min(count, end - offset)))
    return total.hexdigest()


def evict(path):
    """Takes a file out of the page cache, and makes sure."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        for _ in range(EVICTIONS):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            share = cached_share(path)
            if share < 0.01:
                return
            # A process that had it mapped may just be ending.
            time.sleep(0.1)
    finally:
        os.close(fd)
    raise Trouble(f"{path}: {share:.0%} of it stays in the page cache")


def warm(path):
    """Brings a file into the page cache, and makes sure."""
    with open(path, "rb", buffering=0) as file:
        block = bytearray(16 * MIB)
        while file.readinto(block):
            pass
    share = cached_share(path)
    if share < 0.99:
        raise Trouble(f"{path}: only {share:.0%} of it stays in the page cache")


def cached_share(path):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    fd = os.open(path, os.O_RDONLY)
    size = os.fstat(fd).st_size
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    os.close(fd)
    if address in (None, ctypes.c_void_p(-1).value):
        raise Trouble(f"mmap of {path}: {os.strerror(ctypes.get_errno())}")
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    failed = libc.mincore(address, size, pages)
    libc.munmap(address, size)
    if failed:
        raise Trouble(f"mincore of {path}: {os.strerror(ctypes.get_errno())}")
    return sum(byte & 1 for byte in pages.raw) / len(pages)
