# SPDX-License-Identifier: Apache-2.0
"""Figures of the benchmark: how they are kept, paired, held against what is asked of them, and shown. Pure.

A figure is a list of seconds. With each goes what was measured beside it in the same round (a plain copy, what PyTorch
does), and the ratio is taken within the round: the other's time over ours, so 1 is as fast and more is faster.
"""
import json
import re
import statistics

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ANY = 1 << 62

# (arm, pattern of the figure, against, from bytes, to bytes, least ratio). Issue "As fast as the link, and proven".
RATIO_BARS = [
    ("activate", r"warm pool, unverified, idle$", "plain copy", 8 * GIB, ANY, 0.99),
    ("activate", r"warm pool, verified, idle$", "plain copy", 8 * GIB, ANY, 0.98),
    ("activate", r"warm pool, verified, idle$", "plain copy", GIB, 8 * GIB - 1, 0.94),
    ("activate", r"warm pool, unverified, busy$", "plain copy", 8 * GIB, ANY, 0.98),
    ("activate", r"warm pool, verified, busy$", "plain copy", 8 * GIB, ANY, 0.93),
    ("activate", r"cold pool( just trimmed)?, (un)?verified, idle$", "plain copy", 8 * GIB, ANY, 0.92),
    ("deactivate", r"into the pool$", "torch empty_cache", 32 * GIB, 32 * GIB, 1.0),
    ("swap", r"verified(, an idle client attached to each)?$", "plain copy", 32 * GIB, 32 * GIB, 1 / 1.02),
    ("attach", r"as client 2$", "CUDA IPC", 8 * GIB, ANY, 1.0),
    ("attach", r"8 at once, the last one$", "8 x one", 8 * GIB, ANY, 1.0),
    ("cold", r"register and activate$", "O_DIRECT read", 4 * GIB, 4 * GIB, 0.9),
    # 1.28 where load_file itself reaches less than 0.7 of the read.
    ("cold", r"register and activate$", "load_file", 4 * GIB, 4 * GIB, 1.0),
    ("warm_file", r"register and activate$", "load_file", 8 * GIB, 8 * GIB, 3.0),
]
# (arm, pattern of the figure, from bytes, to bytes, most seconds of the median).
SECONDS_BARS = [
    ("deactivate", r"into the pool$", 64 * GIB, 64 * GIB, 0.040),
    ("deactivate", r"until the driver has all of it$", 64 * GIB, 64 * GIB, 0.120),
    ("deactivate", r"with two clients$", 64 * GIB, 64 * GIB, 0.200),
    ("status", r"as the daemon measures$", 0, ANY, 0.005),
]


def spread(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


class Results:
    """All that one run of the command found, in the order in which it found it."""

    def __init__(self, about):
        self.about = about
        self.figures, self.checks, self.skipped = {}, [], []
        self.where("", 0, 0)

    def where(self, arm, size_bytes, cell_bytes):
        """Of what the next figures are."""
        self.arm, self.size_bytes, self.cell_bytes = arm, size_bytes, cell_bytes

    def add(self, figure, seconds, beside=None):
        """One more value of a figure, and what was measured beside it by its name."""
        key = (self.arm, self.size_bytes, self.cell_bytes, figure)
        row = self.figures.setdefault(key, {"seconds": [], "beside": {}})
        row["seconds"].append(seconds)
        for name, other in (beside or {}).items():
            row["beside"].setdefault(name, []).append(other)

    def check(self, what, ok):
        self.checks.append({"arm": self.arm, "size_bytes": self.size_bytes, "cell_bytes": self.cell_bytes,
                            "what": what, "ok": bool(ok)})

    def skip(self, why):
        self.skipped.append({"arm": self.arm, "size_bytes": self.size_bytes, "why": str(why)})

    def document(self):
        rows = []
        for (arm, size_bytes, cell_bytes, figure), row in self.figures.items():
            rows.append({"arm": arm, "size_bytes": size_bytes, "cell_bytes": cell_bytes, "figure": figure,
                         "n": len(row["seconds"]), "seconds": spread(row["seconds"]),
                         "against": {name: comparison(row["seconds"], others)
                                     for name, others in row["beside"].items()},
                         "values_seconds": row["seconds"]})
        return {"runs": [self.about], "figures": rows, "checks": self.checks, "skipped": self.skipped}


def comparison(seconds, others):
    # A round that broke off has no pair.
    pairs = list(zip(seconds, others))
    return {"seconds": spread([other for _, other in pairs]),
            "ratio": spread([other / mine for mine, other in pairs]),
            "values_seconds": [other for _, other in pairs]}


def merge(paths):
    """Documents of several commands as one. Ratios stay those of their own command."""
    merged = {"runs": [], "figures": [], "checks": [], "skipped": []}
    for path in paths:
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        for name, values in merged.items():
            values += document[name]
    return merged


def ratio_bar(row, against):
    for arm, pattern, other, least, most, bar in RATIO_BARS:
        if (arm, other) == (row["arm"], against) and re.search(pattern, row["figure"]) and \
                least <= row["size_bytes"] <= most:
            return bar
    return None


def seconds_bar(row):
    for arm, pattern, least, most, bar in SECONDS_BARS:
        if arm == row["arm"] and re.search(pattern, row["figure"]) and least <= row["size_bytes"] <= most:
            return bar
    return None


def text_of_bytes(count):
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return str(count)


def text_of_seconds(values):
    return "%9.2f %9.2f %9.2f" % tuple(1e3 * values[name] for name in ("median", "min", "max"))


def table(document):
    """The figures as lines of text; times are milliseconds."""
    lines = []
    for run in document["runs"]:
        lines += [f"{name}: {value}" for name, value in run.items() if value not in ("", None)] + [""]
    lines.append(f"{'':58} {'n':>3} {'median':>9} {'min':>9} {'max':>9}   ms; ratio: the other's time / this one's")
    judged = [run.get("driver") for run in document["runs"]] == ["cuda"] * len(document["runs"])
    heading = None
    for row in document["figures"]:
        place = f"{row['arm']}, {text_of_bytes(row['size_bytes'])}, cells of {text_of_bytes(row['cell_bytes'])}"
        if place != heading:
            heading = place
            lines.append(heading)
        bar = seconds_bar(row) if judged else None
        lines.append(f"  {row['figure']:56} {row['n']:3} {text_of_seconds(row['seconds'])}"
                     + verdict(bar, bar and row["seconds"]["median"] <= bar, 1e3, "at most", " ms"))
        for name, other in row["against"].items():
            ratio = other["ratio"]
            bar = ratio_bar(row, name) if judged else None
            lines.append(f"    {'against ' + name:54}     {text_of_seconds(other['seconds'])}   ratio "
                         f"{ratio['median']:.3f} [{ratio['min']:.3f}..{ratio['max']:.3f}]"
                         + verdict(bar, bar and ratio["median"] >= bar, 1, "at least", ""))
    lines += [f"{'ok' if check['ok'] else 'WRONG':6} {check['arm']}, {text_of_bytes(check['size_bytes'])}: "
              f"{check['what']}" for check in document["checks"]]
    lines += [f"skipped {skip['arm']}, {text_of_bytes(skip['size_bytes'])}: {skip['why']}"
              for skip in document["skipped"]]
    return "\n".join(lines) + "\n"


def verdict(bar, met, factor, words, unit):
    if bar is None:
        return ""
    return f"   {words} {factor * bar:.3g}{unit}: {'met' if met else 'MISSED'}"
