#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make weird safetensors inputs for the residency broker, with a manifest.

Plain Python 3 (3.8+), no dependencies.

  make_cases.py OUT              write OUT/open/* and OUT/manifest.json
  make_cases.py OUT --bulk NAME:MIB:TENSORS[:DTYPE]   also write a valid OUT/bulk/NAME.safetensors
                                 (may be repeated; for scheduler and budget tests)
  make_cases.py OUT --big        also write two ~100 MB headers (about 230 MB on disk)
  make_cases.py --list           names only

manifest.json: {"format": 1, "cases": [case, ...]}; a case has
  name, path (relative to OUT; what to register), kind ("file" | "dir"),
  why, refs [..], policy ("format": the format decides | "broker": our own choice),
  expected: {"verdict": "accept", "tensors": N, "bytes": B}
          | {"verdict": "reject", "reason": CODE, "also_ok": [CODE, ..]}
          | {"verdict": "either", "note": ..}     (must not crash, hang or leak)
  reference: what the Rust reference reader says ("accept" | "reject:Error" | null for directories)
  tensors (accept only, at most 64): [{name, dtype, shape, bytes, sha256}] for a byte-exact read-back

"bytes" is the sum of tensor payload bytes, before any padding that the broker adds.
Reason CODEs are classes, not wording: the broker may spell them as it likes as long as
a script can tell them apart and the message names the file and, where there is one, the tensor.
"""
import argparse
import functools
import hashlib
import json
import os
import shutil
import struct
import sys

BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8,
        "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16,
        "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64,
        "I64": 64, "U64": 64}


@functools.lru_cache(maxsize=256)
def block(residue):
    return bytes((i * 31 + residue * 17 + (i >> 8)) & 0xFF for i in range(4096))


def fill(n, seed=7):
    """n deterministic bytes; differs per seed, so a swapped tensor is noticed."""
    return (block(seed % 256) * (n // 4096 + 1))[:n]


def numel(shape):
    p = 1
    for d in shape:
        p *= d
    return p


def nbytes(dtype, shape):
    bits = numel(shape) * BITS[dtype]
    assert bits % 8 == 0, (dtype, shape)
    return bits // 8


def raw(header, data=b"", n=None):
    """A file image. header: bytes, str or an object; n overrides the length prefix."""
    if not isinstance(header, (bytes, str)):
        header = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
    if isinstance(header, str):
        header = header.encode("utf-8")
    return struct.pack("<Q", len(header) if n is None else n) + header + data


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


class Model:
    """A well-formed model: tensors laid out one after the other."""

    def __init__(self, tensors, meta=None, pad=True):
        self.tensors, self.meta, self.pad = tensors, meta, pad

    def build(self):
        head, blob, info, at = {}, [], [], 0
        if self.meta is not None:
            head["__metadata__"] = self.meta
        for i, (name, dtype, shape) in enumerate(self.tensors):
            size = nbytes(dtype, shape)
            data = fill(size, seed=i + 1)
            head[name] = entry(dtype, shape, at, at + size)
            info.append({"name": name, "dtype": dtype, "shape": shape, "bytes": size,
                         "sha256": hashlib.sha256(data).hexdigest()})
            blob.append(data)
            at += size
        text = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        if self.pad:
            text += b" " * (-len(text) % 8)
        return raw(text, b"".join(blob)), info


def accept(tensors, size):
    return {"verdict": "accept", "tensors": tensors, "bytes": size}


def reject(reason, *also):
    r = {"verdict": "reject", "reason": reason}
    if also:
        r["also_ok"] = list(also)
    return r


class Cases:
    def __init__(self, out, big=False):
        self.out, self.big, self.rows = out, big, []

    def _dir(self):
        return "open"

    def _row(self, name, path, kind, why, expected, ref, refs, policy, info):
        row = {"name": name, "path": path, "kind": kind, "why": why,
               "refs": refs, "policy": policy, "expected": expected, "reference": ref}
        if info is not None and len(info) <= 64:
            row["tensors"] = info
        assert name not in [r["name"] for r in self.rows], name
        self.rows.append(row)

    def put(self, rel, image):
        full = os.path.join(self.out, rel)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "wb") as f:
            f.write(image)
        return full

    def file(self, name, image, why, expected, ref, refs=(), policy="format", info=None,
             suffix=".safetensors"):
        rel = "%s/%s%s" % (self._dir(), name, suffix)
        self.put(rel, image)
        self._row(name, rel, "file", why, expected, ref, list(refs), policy, info)

    def good(self, name, model, why, refs=(), ref="accept", policy="format"):
        image, info = model.build()
        self.file(name, image, why, accept(len(info), sum(t["bytes"] for t in info)), ref, refs,
                  policy, info)

    def tree(self, name, files, why, expected, refs=(), policy="format", links=(), register="",
             info=None, ref=None):
        base = "%s/%s" % (self._dir(), name)
        os.makedirs(os.path.join(self.out, base), exist_ok=True)
        for rel, image in files.items():
            if not isinstance(image, bytes):
                image = json.dumps(image, indent=1).encode()
            self.put("%s/%s" % (base, rel), image)
        for rel, target in links:
            full = os.path.join(self.out, base, rel)
            os.makedirs(os.path.dirname(full), exist_ok=True)
            os.symlink(target, full)
        path = base + ("/" + register if register else "")
        kind = "file" if register.endswith(".safetensors") else "dir"
        self._row(name, path, kind, why, expected, ref, list(refs), policy, info)


def index(weight_map, total=None):
    return {"metadata": {"total_size": total if total is not None else 0}, "weight_map": weight_map}


def open_cases(c):
    st, F4B = "safetensors/safetensors#", [("w", "F32", [2, 2])]

    # ---- plain, so that a failing run can be told from a failing file
    c.good("ok_plain", Model([("a", "F32", [2, 3]), ("b", "BF16", [5, 2]), ("c", "I64", [1])]),
           "control: a well-formed file")
    c.good("ok_every_dtype", Model([(d.lower(), d, [8]) for d in BITS]),
           "all 22 dtype names of the format; the broker moves bytes and has to know only their width",
           ["huggingface/candle#2875", "guoqingbao/xinfer#222", "city96/ComfyUI-GGUF#21",
            "alvarobartt/hf-mem#57"])
    image, info = Model([("z", "F32", [2]), ("a", "F32", [3])]).build()
    head = json.dumps({"z": entry("F32", [2], 12, 20), "a": entry("F32", [3], 0, 12)})
    a, z = fill(12, 1), fill(8, 2)
    c.file("ok_header_order_differs", raw(head, a + z), "entries of the header not in file order",
           accept(2, 20), "accept", [], info=[
               {"name": "a", "dtype": "F32", "shape": [3], "bytes": 12,
                "sha256": hashlib.sha256(a).hexdigest()},
               {"name": "z", "dtype": "F32", "shape": [2], "bytes": 8,
                "sha256": hashlib.sha256(z).hexdigest()}])

    # ---- empty and scalar tensors
    c.good("ok_scalar_0d", Model([("scale", "F32", []), ("w", "F16", [4])]),
           "0-d tensor: shape [] is one element, 4 bytes", ["promptfoo/modelaudit#1607"])
    c.good("ok_zero_dim", Model([("scaled_fp8", "F8_E4M3", [0]), ("w", "F32", [2]),
                                 ("tail", "F32", [3, 0, 5])]),
           "zero-size tensors first and last; equal offsets are legal (shipped Wan 2.2 fp8 files)",
           ["promptfoo/modelaudit#1607"])
    c.file("bad_empty_range_but_one_element", raw({"w": entry("F32", [1], 0, 0)}),
           "equal offsets, but the shape says one element", reject("OFFSETS_SIZE_MISMATCH"),
           "reject:TensorInvalidInfo", ["promptfoo/modelaudit#1607"])
    c.file("edge_no_tensors", raw("{}      "), "a header without tensors",
           {"verdict": "either", "note": "accept as 0 tensors / 0 bytes, or reject as EMPTY_MODEL"},
           "accept", [st + "466"], policy="broker")

    # ---- length prefix
    c.file("bad_zero_bytes", b"", "an empty file", reject("HEADER_TOO_SMALL"),
           "reject:HeaderTooSmall")
    c.file("bad_seven_bytes", b"\x10\0\0\0\0\0\0", "shorter than the prefix",
           reject("HEADER_TOO_SMALL"), "reject:HeaderTooSmall")
    c.file("bad_header_past_eof", raw(b'{"w":', n=4096), "prefix says 4096, the file has 5 more bytes",
           reject("HEADER_LENGTH_INVALID", "FILE_TRUNCATED"), "reject:InvalidHeaderLength",
           ["smthemex/ComfyUI_YuE#28"])
    c.file("bad_header_len_u64_max", raw(b"{}", n=2 ** 64 - 1),
           "8 + N wraps to 7 in 64 bits; the check must be N > size - 8",
           reject("HEADER_TOO_LARGE", "HEADER_LENGTH_INVALID"), "reject:HeaderTooLarge",
           ["1bit-MONSTER/1bit-MONSTER#1326"])
    c.file("bad_header_len_100mb_plus_1", raw(b"{}", n=100000001),
           "one over the format's 100,000,000-byte header cap; must not allocate 100 MB first",
           reject("HEADER_TOO_LARGE", "HEADER_LENGTH_INVALID"), "reject:HeaderTooLarge",
           [st + "668", "run-ai/runai-model-streamer#121"])
    c.file("bad_lfs_pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:"
           + b"0" * 64 + b"\nsize 4877660776\n",
           "a Git LFS pointer under a model's name: the prefix reads as a huge number; say that it is"
           " an LFS pointer", reject("NOT_SAFETENSORS", "HEADER_TOO_LARGE"), "reject:HeaderTooLarge",
           ["Fanghua-Yu/SUPIR#106", "huggingface/diffusers#5520"])
    c.file("bad_html_error_page", b"<!DOCTYPE html><html><body>Not Found</body></html>",
           "a download that saved an error page", reject("NOT_SAFETENSORS", "HEADER_TOO_LARGE"),
           "reject:HeaderTooLarge", ["huggingface/diffusers#5520"])

    # ---- JSON
    c.file("bad_not_json", raw('{"w":{"dtype":"F32",}'), "broken JSON", reject("HEADER_NOT_JSON"),
           "reject:InvalidHeaderDeserialization")
    c.file("bad_header_is_array", raw("[]"), "JSON, but not an object", reject("HEADER_NOT_JSON"),
           "reject:InvalidHeaderDeserialization")
    c.file("bad_header_not_utf8", raw(b'{"w\xff":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
                                      b"\0"), "a name that is not UTF-8",
           reject("HEADER_NOT_UTF8", "HEADER_NOT_JSON"), "reject:InvalidHeader")
    c.file("bad_double_document", raw('{},"__metadata__":{"k":"v"}}'),
           "what one writer made of a model with metadata only", reject("HEADER_NOT_JSON"),
           "reject:InvalidHeaderDeserialization", [st + "466"])
    c.file("bad_missing_dtype", raw({"w": {"shape": [1], "data_offsets": [0, 4]}}, fill(4)),
           "an entry without dtype", reject("TENSOR_ENTRY_MALFORMED", "HEADER_NOT_JSON"),
           "reject:InvalidHeaderDeserialization")
    c.file("bad_three_offsets", raw({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}},
                                    fill(4)), "data_offsets with three numbers",
           reject("TENSOR_ENTRY_MALFORMED", "HEADER_NOT_JSON"),
           "reject:InvalidHeaderDeserialization", ["ml-explore/mlx#3363"])
    c.file("bad_lowercase_dtype", raw({"w": entry("f32", [1], 0, 4)}, fill(4)),
           "dtype names are case-sensitive", reject("DTYPE_UNKNOWN", "HEADER_NOT_JSON"),
           "reject:InvalidHeaderDeserialization")
    c.file("ok_extra_key_in_entry",
           raw({"w": dict(entry("F32", [1], 0, 4), note="x")}, fill(4, 1)),
           "an unknown key inside an entry is ignored", accept(1, 4), "accept")

    # ---- metadata
    c.good("ok_metadata_strings", Model(F4B, {"format": "pt", "note": "x"}), "ordinary metadata")
    c.good("ok_metadata_empty", Model(F4B, {}), "empty metadata object (31 shards shipped this way)",
           ["foundation-model-stack/fastsafetensors#88"])
    image, info = Model(F4B).build()
    c.file("ok_metadata_null",
           raw('{"__metadata__":null,"w":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}',
               fill(16, 1)), "null metadata means none; it must not be taken for a tensor",
           accept(1, 16), "accept",
           ["foundation-model-stack/fastsafetensors#96", st + "823"], info=info)
    c.file("bad_metadata_number",
           raw('{"__metadata__":{"step":0},"w":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}',
               fill(16)), "a metadata value that is not a string",
           reject("METADATA_NOT_STRING_MAP", "HEADER_NOT_JSON"),
           "reject:InvalidHeaderDeserialization", [st + "278"])

    # ---- offsets
    two = {"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 8, 16)}
    c.file("bad_alias_same_range",
           raw({"k_proj": entry("F32", [2], 0, 8), "v_proj": entry("F32", [2], 0, 8)}, fill(8)),
           "two names own the same bytes", reject("OFFSETS_OVERLAP", "OFFSETS_INVALID"),
           "reject:InvalidOffset", ["ohdearquant/lattice#752", st + "586"])
    c.file("bad_gap", raw({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 12, 20)}, fill(20)),
           "four bytes belong to nobody", reject("OFFSETS_GAP", "OFFSETS_INVALID"),
           "reject:InvalidOffset")
    c.file("bad_first_not_at_zero", raw({"a": entry("F32", [2], 8, 16)}, fill(16)),
           "the data area must start with a tensor", reject("OFFSETS_GAP", "OFFSETS_INVALID"),
           "reject:InvalidOffset")
    c.file("bad_begin_after_end", raw({"a": entry("F32", [2], 8, 0)}, fill(8)), "begin > end",
           reject("OFFSETS_INVALID", "OFFSETS_GAP"), "reject:InvalidOffset",
           ["leejet/stable-diffusion.cpp#1754"])
    c.file("bad_negative_offset",
           raw('{"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}}', fill(8)),
           "a negative offset", reject("TENSOR_ENTRY_MALFORMED", "OFFSETS_INVALID", "HEADER_NOT_JSON"),
           "reject:InvalidHeaderDeserialization")
    c.file("bad_shape_larger_than_range", raw({"t": entry("F32", [1000, 1000], 0, 4)}, fill(4)),
           "shape says 4,000,000 bytes, the range 4", reject("OFFSETS_SIZE_MISMATCH"),
           "reject:TensorInvalidInfo", ["ml-explore/mlx#3363"])
    c.file("bad_truncated_data", raw(two, fill(15)), "the last byte is missing (stopped download)",
           reject("FILE_TRUNCATED"), "reject:MetadataIncompleteBuffer",
           ["ml-explore/mlx#3409", "Comfy-Org/ComfyUI#6744", "datalab-to/marker#970"])
    c.file("bad_header_only", raw({"t": entry("F32", [1000, 1000], 0, 4000000)}),
           "a consistent header and no data at all", reject("FILE_TRUNCATED"),
           "reject:MetadataIncompleteBuffer", ["ml-explore/mlx#3409", "invoke-ai/InvokeAI#7009"])

    # ---- arithmetic
    c.file("bad_shape_wraps_to_zero", raw({"t": entry("U8", [2 ** 32, 2 ** 32], 0, 0)}),
           "2^32 x 2^32 wraps to 0 in 64 bits and then matches an empty range",
           reject("SHAPE_OVERFLOW", "OFFSETS_SIZE_MISMATCH"), "reject:ValidationOverflow",
           ["leejet/stable-diffusion.cpp#1876", "google-ai-edge/LiteRT#9255"])
    c.file("bad_shape_times_width_wraps", raw({"t": entry("F64", [2 ** 61], 0, 0)}),
           "2^61 elements of 8 bytes wrap to 0 only once the width is multiplied in",
           reject("SHAPE_OVERFLOW", "OFFSETS_SIZE_MISMATCH"), "reject:ValidationOverflow",
           ["google-ai-edge/LiteRT#9255"])
    c.file("bad_negative_dim", raw('{"t":{"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]}}',
                                   fill(4)), "(-1) x (-1) = 1 in signed arithmetic",
           reject("SHAPE_INVALID", "TENSOR_ENTRY_MALFORMED", "HEADER_NOT_JSON"),
           "reject:InvalidHeaderDeserialization", ["kekzl/imp#1605"])
    c.file("bad_float_dim", raw('{"t":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}', fill(4)),
           "a dimension written as 1.0", reject("SHAPE_INVALID", "TENSOR_ENTRY_MALFORMED",
                                                "HEADER_NOT_JSON"),
           "reject:InvalidHeaderDeserialization", ["kekzl/imp#1605"])

    # ---- alignment and small tensors
    c.good("ok_odd_header_length", Model([("w", "F32", [64]), ("h", "BF16", [64])], {"k": "vv"},
                                         pad=False),
           "the data area starts at an odd byte: on the GPU each tensor must still start on a"
           " 256-byte boundary", ["safetensors/safetensors#231", "ggml-org/llama.cpp#18291",
                                  "onnxruntime/mobius#248"])
    c.good("ok_f32_after_odd_u8", Model([("mask", "U8", [3]), ("w", "F32", [64]), ("x", "F64", [2])]),
           "a 3-byte tensor pushes all that follows off its natural alignment",
           ["safetensors/safetensors#695", "safetensors/safetensors#607", "mudler/vllm.cpp#2558"])
    n = 20000
    c.good("ok_20000_tiny_tensors", Model([("t.%d" % i, "F32", [1]) for i in range(n)]),
           "80,000 payload bytes in 20,000 tensors: with one 2 MiB granule each this would need"
           " 39 GiB of GPU memory; the broker may charge at most three granules for it",
           ["safetensors/safetensors#668", "python-gen-worker#1068: granularity tax"])

    # ---- sharded models
    s1, i1 = Model([("a", "F32", [2]), ("b", "F32", [2])]).build()
    s2, i2 = Model([("c", "F32", [4])]).build()
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    wm = {"a": names[0], "b": names[0], "c": names[1]}
    c.tree("ok_sharded", {names[0]: s1, names[1]: s2, "model.safetensors.index.json": index(wm, 32)},
           "two shards and their index", accept(3, 32), info=i1 + i2)
    c.tree("bad_shard_missing", {names[0]: s1, "model.safetensors.index.json": index(wm, 32)},
           "the index names a shard that is not there; name it in the message",
           reject("SHARD_MISSING"), ["sgl-project/sglang#32279", "Neph0s/CoSER#3",
                                     "JustVugg/colibri#1317"])
    c.tree("bad_index_names_absent_tensor",
           {names[0]: s1, names[1]: s2,
            "model.safetensors.index.json": index(dict(wm, **{"mtp.fc.weight": names[1]}), 32)},
           "the index maps a tensor to a shard that does not hold it",
           reject("INDEX_TENSOR_MISSING"), ["huggingface/huggingface_hub#4728",
                                            "JustVugg/colibri#1487"])
    c.tree("ok_stray_file_beside_index",
           {names[0]: s1, names[1]: s2, "model.safetensors.index.json": index(wm, 32),
            "model.safetensors": Model([("a", "U8", [2]), ("b", "U8", [2])]).build()[0]},
           "a stray single file beside an index: the index wins, the stray is not merged in",
           accept(3, 32), ["Blaizzy/mlx-vlm#1464"], info=i1 + i2)
    c.tree("ok_index_total_size_wrong",
           {names[0]: s1, names[1]: s2, "model.safetensors.index.json": index(wm, 999)},
           "total_size in the index is a claim; the headers are the measurement",
           accept(3, 32), policy="broker", info=i1 + i2)

    if c.big:
        n = 1290000
        for name, form, expected, ref, why in (
                ("ok_header_94mb", '"d.%07d"', {"verdict": "either", "note":
                 "accept as 1,290,000 tensors / 5,160,000 bytes, or reject as HEADER_TOO_LARGE with the"
                 " broker's own cap named; at most 10 s and 2 GiB of daemon memory either way"},
                 "accept", "just under the format's cap"),
                ("bad_header_132mb", '"dataset.sample.features.embedding.%07d"',
                 reject("HEADER_TOO_LARGE"), "reject:HeaderTooLarge",
                 "consistent, but its header is over the cap: refuse and name both numbers")):
            form += ':{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
            head = "{" + ",".join(form % (i, 4 * i, 4 * i + 4) for i in range(n)) + "}"
            c.file(name, raw(head, bytes(4 * n)), why, expected, ref, [st + "668"])


def bulk(out, spec):
    part = spec.split(":")
    name, mib, count = part[0], int(part[1]), int(part[2])
    dtype = part[3] if len(part) > 3 else "BF16"
    width = BITS[dtype] // 8
    each = mib * 1048576 // count // width
    head = {"layer.%d.weight" % i: entry(dtype, [each], i * each * width, (i + 1) * each * width)
            for i in range(count)}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    os.makedirs(os.path.join(out, "bulk"), exist_ok=True)
    path = os.path.join(out, "bulk", name + ".safetensors")
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for i in range(count):
            left, chunk = each * width, fill(1048576, i + 1)
            while left:
                f.write(chunk[:min(left, len(chunk))])
                left -= min(left, len(chunk))
    return path


def main():
    ap = argparse.ArgumentParser(description="weird safetensors inputs with a manifest")
    ap.add_argument("out", nargs="?")
    ap.add_argument("--big", action="store_true")
    ap.add_argument("--bulk", action="append", default=[], metavar="NAME:MIB:TENSORS[:DTYPE]")
    ap.add_argument("--list", action="store_true")
    args = ap.parse_args()
    if args.list and not args.out:
        import tempfile
        tmp = args.out = tempfile.mkdtemp()
    elif not args.out:
        ap.error("OUT is needed")
    else:
        tmp = None
    shutil.rmtree(os.path.join(args.out, "open"), ignore_errors=True)
    os.makedirs(args.out, exist_ok=True)
    c = Cases(args.out, args.big)
    open_cases(c)
    rows = c.rows
    if not tmp:
        with open(os.path.join(args.out, "manifest.json"), "w") as f:
            json.dump({"format": 1, "cases": rows}, f, indent=1, ensure_ascii=True)
            f.write("\n")
        for spec in args.bulk:
            print(bulk(args.out, spec))
    if args.list:
        for r in rows:
            print("%-36s %s" % (r["name"], r["expected"]["verdict"]))
    if tmp:
        shutil.rmtree(tmp)
    verdicts = [r["expected"]["verdict"] for r in rows]
    print("%d cases: %d accept, %d reject, %d either" % (
        len(rows), verdicts.count("accept"), verdicts.count("reject"), verdicts.count("either")))


if __name__ == "__main__":
    main()
