# SPDX-License-Identifier: Apache-2.0
"""Tests of the benchmark; run by gpu_bench_test.sh in the directory that has the built programs."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import bench_figures  # noqa: E402
from bench_files import MIB, file_hash, tensor_sizes  # noqa: E402

ARMS = ["activate", "deactivate", "verify", "attach", "peers", "swap", "cold", "warm_file", "status", "two_gpus"]


def gpu_bench(*arguments):
    return subprocess.run([sys.executable, str(HERE / "gpu_bench"), *map(str, arguments)], capture_output=True,
                          text=True)


def short_run(directory, arms, *more):
    """The command's outcome, and what it wrote."""
    path = pathlib.Path(directory) / "found.json"
    done = gpu_bench("--driver", "sim", "--programs", os.getcwd(), "--dir", directory, "--arms", ",".join(arms),
                     "--sizes", "8MiB", "--cell_bytes", "2MiB", "--runs", 2, "--status_models", 2,
                     "--sim_devices", 2, "--sim_device_bytes", "256MiB", "--json", path, *more)
    return done, json.loads(path.read_text())


class ShortRun(unittest.TestCase):

    def setUp(self):
        # Not below /dev/shm, where files cannot be read past the page cache.
        directory = tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR", "/var/tmp"))
        self.addCleanup(directory.cleanup)
        self.directory = directory.name

    def test_every_arm_runs_and_finds_its_contents_right(self):
        done, found = short_run(self.directory, ARMS)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual([check for check in found["checks"] if not check["ok"]], [])
        skipped = {skip["arm"]: skip["why"] for skip in found["skipped"]}
        self.assertIn("PyTorch", skipped.pop("peers"))
        measured = {row["arm"] for row in found["figures"]}
        # What this build cannot do yet is skipped by name, anything else has figures.
        self.assertEqual(measured | (set(skipped) & {"warm_file"}), set(ARMS) - {"peers"})
        for row in found["figures"]:
            self.assertEqual((row["n"], row["cell_bytes"]), (2 if row["figure"] != "detach" else 6, 2 * MIB), row)
            self.assertGreater(row["seconds"]["min"], 0)
        run = found["runs"][0]
        self.assertEqual(run["driver"], "sim")
        for name in ("commit", "machine", "date"):
            self.assertIn(name, run)
        self.assertEqual(os.listdir(self.directory), ["found.json"])

    def test_an_arm_that_breaks_off_fails_the_run_and_the_next_arm_goes_on(self):
        done, found = short_run(self.directory, ["swap", "status"], "--sizes", "512MiB")  # more than the cards have
        self.assertEqual(done.returncode, 1)
        self.assertIn("GPU_BUDGET", [check["what"] for check in found["checks"] if not check["ok"]][0])
        self.assertEqual({row["arm"] for row in found["figures"]}, {"status"})

    def test_a_wrong_word_is_a_usage_error(self):
        for wrong in (["--arms", "activat"], ["--sizes", "3"], ["--driver", "auto"]):
            self.assertEqual(gpu_bench(*wrong).returncode, 2, wrong)


class Figures(unittest.TestCase):

    def results(self, driver="cuda"):
        results = bench_figures.Results({"driver": driver})
        results.where("activate", 8 << 30, 64 << 20)
        return results

    def test_a_ratio_is_taken_within_each_round(self):
        results = self.results()
        for mine, other in ((1.0, 2.0), (4.0, 4.0), (10.0, 5.0)):
            results.add("x", mine, {"plain copy": other})
        row = results.document()["figures"][0]
        self.assertEqual(row["seconds"], {"median": 4.0, "min": 1.0, "max": 10.0})
        # Not 4/4 of the medians by chance: the rounds' ratios are 2, 1 and a half.
        self.assertEqual(row["against"]["plain copy"]["ratio"], {"median": 1.0, "min": 0.5, "max": 2.0})

    def test_what_is_asked_for_is_judged_on_a_gpu_only(self):
        for driver, words in (("cuda", ["met", "MISSED"]), ("sim", [])):
            results = self.results(driver)
            for beside in (0.991, 0.989):
                results.where("activate", 8 << 30, 64 << 20 if beside > 0.99 else 128 << 20)
                results.add("warm pool, unverified, idle", 1.0, {"plain copy": beside})
            text = bench_figures.table(results.document())
            self.assertEqual([word for word in text.split() if word in ("met", "MISSED")], words)


    def test_files_of_several_runs_become_one_table(self):
        with tempfile.TemporaryDirectory() as directory:
            paths = [f"{directory}/{arm}.json" for arm in ("swap", "status")]
            for path, arm in zip(paths, ("swap", "status")):
                results = self.results()
                results.where(arm, 8 << 30, 64 << 20)
                results.add(f"a figure of {arm}", 1.0)
                results.check(f"contents of {arm}", True)
                pathlib.Path(path).write_text(json.dumps(results.document()))
            done = gpu_bench("--merge", *paths, "--json", f"{directory}/all.json")
            self.assertEqual(done.returncode, 0, done.stderr)
            merged = json.loads(pathlib.Path(directory, "all.json").read_text())
            self.assertEqual([row["arm"] for row in merged["figures"]], ["swap", "status"])
            self.assertEqual([len(merged["runs"]), len(merged["checks"])], [2, 2])
            for words in ("a figure of swap", "a figure of status"):
                self.assertIn(words, done.stdout)


class Checkpoints(unittest.TestCase):

    def test_tensors_of_any_count_add_up_to_the_model(self):
        for size, count in ((2 * MIB, None), (8 << 30, None), (32 << 30, None), (64 << 30, None), (14 * MIB, 3)):
            sizes = tensor_sizes(size, count)
            self.assertEqual(sum(sizes), size)
            self.assertLessEqual(max(sizes) - min(sizes), 2 * MIB)
        self.assertEqual([len(tensor_sizes(n << 30)) for n in (8, 32, 64)], [174, 696, 1392])

    def test_a_hash_sees_one_wrong_bit_of_what_it_reads(self):
        with tempfile.NamedTemporaryFile() as file:
            header = json.dumps({"t": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}).encode()
            file.write(len(header).to_bytes(8, "little") + header + bytes(range(16)))
            file.flush()
            before = file_hash(file.name, 8, 4), file_hash(file.name, 16, 16)
            file.seek(8 + len(header) + 9)
            file.write(b"\0")
            file.flush()
            after = file_hash(file.name, 8, 4), file_hash(file.name, 16, 16)
            self.assertNotEqual(before[0], after[0])
            self.assertNotEqual(before[1], after[1])


if __name__ == "__main__":
    unittest.main()
