// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/nvml.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

constexpr char kUuid[] = "GPU-1";
constexpr unsigned int kNoInstance = ~0U;

// An NVML of one card, whose table of functions has no object to go with it, as the library's has none.
struct Card {
  std::vector<NvmlProcessInfo> computing;
  std::vector<NvmlProcessInfo> drawing;
  NvmlResult answer = kNvmlSuccess;
};
Card the_card;

NvmlResult Init() { return kNvmlSuccess; }
const char* ErrorString(NvmlResult result) { return result == kNvmlNotSupported ? "Not Supported" : "an error"; }
NvmlResult ByUuid(const char* uuid, NvmlDevice* device) {
  *device = nullptr;
  return uuid == std::string(kUuid) ? kNvmlSuccess : kNvmlNotFound;
}
NvmlResult List(const std::vector<NvmlProcessInfo>& processes, unsigned int* count, NvmlProcessInfo* out) {
  if (the_card.answer != kNvmlSuccess) return the_card.answer;
  const unsigned int room = *count;
  *count = static_cast<unsigned int>(processes.size());
  if (processes.size() > room) return kNvmlInsufficientSize;
  std::copy(processes.begin(), processes.end(), out);
  return kNvmlSuccess;
}
NvmlResult Computing(NvmlDevice, unsigned int* count, NvmlProcessInfo* out) {
  return List(the_card.computing, count, out);
}
NvmlResult Drawing(NvmlDevice, unsigned int* count, NvmlProcessInfo* out) { return List(the_card.drawing, count, out); }

Nvml With(Card card) {
  the_card = std::move(card);
  return {Init, ErrorString, ByUuid, Computing, Drawing};
}

std::string WhyNot(const absl::StatusOr<std::vector<ProcessMemory>>& measured) {
  CHECK(ReasonOf(measured.status()) == "NO_NVML");
  return std::string(measured.status().message());
}

TEST_CASE("A process that computes and draws is counted once, and one with several MIG instances with all of them") {
  const Nvml nvml = With({.computing = {{10, 5, kNoInstance, kNoInstance}, {7, 1, 1, 0}, {7, 2, 2, 0}},
                          .drawing = {{10, 5, kNoInstance, kNoInstance}, {12, 4, kNoInstance, kNoInstance}}});
  const auto measured = MeasureProcesses(nvml, kUuid, 10);
  REQUIRE(measured.ok());
  REQUIRE(measured->size() == 3);
  CHECK(measured->at(0).pid == 7);
  CHECK(measured->at(0).bytes == 3);
  CHECK(measured->at(1).pid == 10);
  CHECK(measured->at(1).bytes == 5);
  CHECK(measured->at(2).bytes == 4);
}

TEST_CASE("More processes than there was room for at first are all told") {
  Card card;
  for (unsigned int pid = 1; pid <= 1000; ++pid) card.computing.push_back({pid, pid, kNoInstance, kNoInstance});
  const auto measured = MeasureProcesses(With(card), kUuid, 1000);
  REQUIRE(measured.ok());
  REQUIRE(measured->size() == 1000);
  CHECK(measured->back().bytes == 1000);
}

TEST_CASE("What NVML does not tell is not measured, and the reason says why") {
  const std::vector<NvmlProcessInfo> processes = {{10, 5, kNoInstance, kNoInstance},
                                                  {11, kNvmlNotAvailable, kNoInstance, kNoInstance}};
  SECTION("bytes of a process, as on WSL") {
    const Nvml nvml = With({.computing = processes});
    CHECK(WhyNot(MeasureProcesses(nvml, kUuid, 10)) == "NVML does not tell what process 11 has");
  }
  SECTION("any process at all") {
    const Nvml nvml = With({.answer = kNvmlNotSupported});
    CHECK(WhyNot(MeasureProcesses(nvml, kUuid, 10)) == "nvmlDeviceGetComputeRunningProcesses: Not Supported");
  }
  SECTION("this process, as in a container with pids of its own") {
    const Nvml nvml = With({.computing = {processes[0]}});
    CHECK(absl::StrContains(WhyNot(MeasureProcesses(nvml, kUuid, 77)), "another pid namespace"));
  }
  SECTION("the card") {
    const Nvml nvml = With({.computing = {processes[0]}});
    CHECK(absl::StrContains(WhyNot(MeasureProcesses(nvml, "GPU-2", 10)), "nvmlDeviceGetHandleByUUID"));
  }
}

}  // namespace
}  // namespace residency
