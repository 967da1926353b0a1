// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/status_text.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <sstream>
#include <string>

#include "client/ctl/progress.h"

namespace residency {
namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr char kUuid[] = "GPU-6e0dfb34-0c4e-4f6c-8d6c-6a2a1f3f9a10";

v1::Status Example() {
  v1::Status status;
  v1::DaemonStatus& daemon = *status.mutable_daemon();
  daemon.set_version("0.1.0");
  daemon.set_pid(1234);
  daemon.set_driver("cuda");
  daemon.set_serving(true);
  daemon.set_uptime_seconds(7384);
  status.mutable_host()->set_pinned_bytes(22 * kGiB);
  status.mutable_host()->set_budget_bytes(64 * kGiB);
  v1::DeviceStatus& device = *status.add_devices();
  device.set_uuid(kUuid);
  device.set_name("NVIDIA H200");
  device.set_state(v1::DEVICE_STATE_ONLINE);
  device.set_total_bytes(140 * kGiB);
  device.set_free_bytes(100 * kGiB);
  device.set_broker_bytes(22 * kGiB);
  device.set_pool_idle_bytes(3 * kGiB);
  device.set_contexts_bytes(kGiB);
  device.set_others_bytes(14 * kGiB);
  v1::ModelStatus& model = *status.add_models();
  model.set_name("flux");
  model.set_state(v1::MODEL_STATE_ACTIVE);
  model.set_mode(v1::MODEL_MODE_HELD);
  model.set_device_uuid(kUuid);
  model.set_generation(3);
  model.set_claimed_device_bytes(22 * kGiB);
  model.set_device_bytes(22 * kGiB);
  model.set_components_on_gpu(1);
  v1::ComponentStatus& component = *model.add_components();
  component.set_name("transformer");
  component.set_tensors(780);
  component.set_cells(352);
  component.set_cells_on_gpu(352);
  component.set_device_bytes(22 * kGiB);
  v1::LeaseStatus& lease = *model.add_leases();
  lease.set_id(5);
  lease.set_pid(4321);
  lease.set_client("worker");
  lease.set_state(v1::LEASE_STATE_LIVE);
  lease.set_in_use(true);
  lease.set_claimed_mapped_bytes(22 * kGiB);
  lease.set_age_seconds(75);
  return status;
}

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string LineWith(const std::string& text, const std::string& part) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (Has(line, part)) return line;
  }
  return "";
}

}  // namespace

TEST_CASE("host memory that is not page-locked is shown as pageable, with why, and the limit with its source") {
  v1::Status status = Example();
  CHECK_FALSE(Has(StatusText(status), "pageable"));
  status.mutable_host()->set_pageable_bytes(2 * kGiB);
  status.mutable_host()->set_pin_limit_bytes(30 * kGiB);
  status.mutable_host()->set_pin_limit_source(v1::PIN_LIMIT_SOURCE_PROBED);
  v1::Pin& pin = *status.mutable_models(0)->mutable_pin();
  pin.set_message("too much");
  const std::string text = StatusText(status);
  INFO(text);
  CHECK(LineWith(text, "host memory") == "host memory: 22.00 GiB pinned, 2.00 GiB pageable of 64.00 GiB");
  CHECK(LineWith(text, "can be pinned") == "  at most 30.00 GiB can be pinned (probed)");
  CHECK(LineWith(text, "host copy") == "  host copy: too much");
  pin.set_pinned(true);
  CHECK_FALSE(Has(StatusText(status), "host copy"));
}

TEST_CASE("status shows daemon, host, device, model, component and lease, in GiB and within 80 columns") {
  const std::string text = StatusText(Example());
  CHECK(Has(text, "residencyd 0.1.0  pid 1234  driver cuda  up 2h03m  serving"));
  CHECK(Has(text, "22.00 GiB pinned of 64.00 GiB"));
  const std::string figures = LineWith(text, "140.00 GiB");
  for (const char* figure : {"22.00 GiB", "3.00 GiB", "1.00 GiB", "14.00 GiB", "100.00 GiB"}) {
    CHECK(Has(figures, figure));
  }
  CHECK(Has(text, "flux  active  held  generation 3"));
  CHECK(Has(LineWith(text, "transformer"), "352 of 352"));
  const std::string lease = LineWith(text, "worker");
  for (const char* part : {"5", "4321", "live", "yes", "1m15s"}) CHECK(Has(lease, part));
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) CHECK(line.size() <= 80);
}

TEST_CASE("processes are listed with what they have, by pid, user and name, and within 80 columns") {
  v1::Status status = Example();
  CHECK_FALSE(Has(StatusText(status), "process"));
  v1::ProcessStatus& daemon = *status.mutable_devices(0)->add_processes();
  daemon.set_pid(1234);
  daemon.set_uid(0);
  daemon.set_client("residencyd");
  daemon.set_bytes(26 * kGiB);
  v1::ProcessStatus& stranger = *status.mutable_devices(0)->add_processes();
  stranger.set_pid(4194304);
  stranger.set_bytes(13 * kGiB);
  const std::string text = StatusText(status);
  INFO(text);
  CHECK(LineWith(text, "residencyd  ") == "     1234       0 residencyd             26.00 GiB");
  CHECK(LineWith(text, "(no client)") == "  4194304       ? (no client)            13.00 GiB");
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) CHECK(line.size() <= 80);
}

TEST_CASE("a note stands where claim and measurement differ, and only there") {
  v1::Status status = Example();
  CHECK_FALSE(Has(StatusText(status), "NOTE"));
  status.mutable_models(0)->set_device_bytes(21 * kGiB);
  const std::string note = LineWith(StatusText(status), "NOTE");
  CHECK(Has(note, "23622320128 bytes claimed"));
  CHECK(Has(note, "22548578304 measured"));
}

TEST_CASE("where a host copy lies is shown on a host of several memory nodes, with the node that its GPU is near") {
  v1::Status status = Example();
  CHECK_FALSE(Has(StatusText(status), " on node "));
  v1::ModelStatus& model = *status.mutable_models(0);
  v1::NodeBytes& near = *model.add_host_nodes();
  near.set_node(1);
  near.set_bytes(20 * kGiB);
  v1::NodeBytes& spilled = *model.add_host_nodes();
  spilled.set_node(3);
  spilled.set_bytes(2 * kGiB);
  CHECK(LineWith(StatusText(status), "on node") == "  host memory: 20.00 GiB on node 1, 2.00 GiB on node 3");
  status.mutable_devices(0)->set_numa_node(1);
  CHECK(Has(LineWith(StatusText(status), "on node"), "on node 3; its GPU is near node 1"));
  model.set_host_not_placed("mbind: not permitted");
  CHECK(LineWith(StatusText(status), "NOTE") == "  NOTE: not placed near the GPU: mbind: not permitted");
}

TEST_CASE("errors, activations and registrations under way are shown") {
  v1::Status status = Example();
  v1::ModelStatus& model = *status.mutable_models(0);
  model.mutable_last_error()->set_code("DATA_LOSS");
  model.mutable_last_error()->set_reason("VERIFY");
  model.mutable_last_error()->set_message("cell 3");
  model.mutable_last_activation()->set_bytes(kGiB);
  model.mutable_last_activation()->set_seconds(0.25);
  model.mutable_last_activation()->set_verified(16);
  CHECK(Has(StatusText(status), "last error: DATA_LOSS/VERIFY: cell 3"));
  CHECK(Has(StatusText(status), "1.00 GiB moved in 0.250 s, 16 cells verified"));
  model.set_state(v1::MODEL_STATE_REGISTERING);
  model.set_progress(0.42);
  CHECK(Has(StatusText(status), "42 %"));
  status.clear_models();
  CHECK(Has(StatusText(status), "no models"));
}

TEST_CASE("progress shows what is read and, once there is any, what is page-locked, in the columns there are") {
  const auto line = [](uint64_t done_bytes, uint64_t pinned_bytes, uint64_t columns) {
    return ProgressLine(done_bytes, 4 * kGiB, pinned_bytes, absl::Seconds(2), columns);
  };
  CHECK(line(kGiB, 0, 60) == "[####.............]  25 %  1.00 GiB of 4.00 GiB  512.0 MiB/s");
  CHECK(Has(line(2 * kGiB, kGiB, 79), " 50 %  2.00 GiB of 4.00 GiB  1.00 GiB/s  1.00 GiB pinned"));
  CHECK(line(4 * kGiB, 3 * kGiB, 79).starts_with("[####"));
  for (uint64_t columns = 10; columns < 90; ++columns) CHECK(line(4 * kGiB, 3 * kGiB, columns).size() <= columns);
  CHECK(ProgressLine(0, 0, 0, absl::Seconds(1), 79) == "reading headers");
}

TEST_CASE("tensors stand under their component with type, size and shape") {
  v1::ListTensorsResponse table;
  table.set_span_bytes(4 << 20);
  table.set_cell_bytes(2 << 20);
  table.add_components("unet");
  table.add_components("vae");
  v1::Tensor& tensor = *table.add_tensors();
  tensor.set_name("conv.weight");
  tensor.set_component(1);
  tensor.set_dtype("BF16");
  tensor.add_shape(320);
  tensor.add_shape(4);
  tensor.set_bytes(2560);
  const std::string text = TensorsText(table);
  CHECK(text.substr(0, 4) == "vae\n");
  CHECK(Has(LineWith(text, "conv.weight"), "BF16"));
  CHECK(Has(LineWith(text, "conv.weight"), "[320, 4]"));
  CHECK(Has(text, "1 tensors, 4.0 MiB of addresses in cells of 2.0 MiB"));
}

TEST_CASE("a model in the host tier file says what it is verified against, and the host how much of it is page cache") {
  v1::Status status = Example();
  CHECK_FALSE(Has(StatusText(status), "page cache"));
  CHECK_FALSE(Has(StatusText(status), "host tier"));
  status.mutable_host()->set_pinned_bytes(3 * kGiB);
  status.mutable_host()->set_page_cache_bytes(kGiB);
  v1::ModelStatus& model = *status.mutable_models(0);
  model.set_host_tier(v1::HOST_TIER_FILE);
  model.mutable_last_activation()->set_trusted(3);
  const std::string text = StatusText(status);
  CHECK(Has(LineWith(text, "host memory"), "3.00 GiB pinned (1.00 GiB of it weight files' page cache)"));
  CHECK(Has(text, "  host tier file: verified against the first activation\n"));
  CHECK(Has(LineWith(text, "last activation"), "0 cells verified, 3 trusted"));
}

TEST_CASE("ages have the two largest units") {
  CHECK(AgeText(0.25) == "0.2s");
  CHECK(AgeText(59) == "59s");
  CHECK(AgeText(250) == "4m10s");
  CHECK(AgeText(7384) == "2h03m");
  CHECK(AgeText(180000) == "2d02h");
}

}  // namespace residency
