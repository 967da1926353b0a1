// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/sim_faults.h"

#include <catch2/catch.hpp>
#include <string>

#include "absl/time/time.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

std::unique_ptr<FaultPlan> Plan(std::string_view spec) {
  absl::StatusOr<std::unique_ptr<FaultPlan>> plan = FaultPlan::Parse(spec);
  INFO(plan.status());
  REQUIRE(plan.ok());
  return *std::move(plan);
}

constexpr absl::Duration kAtOnce = absl::ZeroDuration();

}  // namespace

TEST_CASE("an empty text is a plan without faults") {
  for (const char* text : {"", "  "}) {
    const auto plan = Plan(text);
    CHECK(plan->OnCall("cuMemCreate", kAtOnce).error == CUDA_SUCCESS);
    CHECK(plan->OnCall("cuMemCreate", kAtOnce).delay == absl::ZeroDuration());
    CHECK_FALSE(plan->Attribute("VMM").has_value());
    CHECK_FALSE(plan->pin_limit_bytes().has_value());
  }
}

TEST_CASE("@k hits the k-th call of that function and no other") {
  const auto plan = Plan("cuMemCreate@3=OUT_OF_MEMORY");
  for (int call = 1; call <= 6; ++call) {
    CHECK(plan->OnCall("cuMemMap", kAtOnce).error == CUDA_SUCCESS);
    CHECK(plan->OnCall("cuMemCreate", kAtOnce).error == (call == 3 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS));
  }
}

TEST_CASE("without a number every call is hit") {
  const auto plan = Plan("cuMemUnmap=+500ms");
  for (int call = 1; call <= 3; ++call) {
    CHECK(plan->OnCall("cuMemUnmap", absl::Hours(call)).delay == absl::Milliseconds(500));
    CHECK(plan->OnCall("cuMemUnmap", absl::Hours(call)).error == CUDA_SUCCESS);
  }
}

TEST_CASE("<duration hits every call in that time after the opening") {
  const auto plan = Plan("cuInit<20s=NO_DEVICE");
  CHECK(plan->OnCall("cuInit", kAtOnce).error == CUDA_ERROR_NO_DEVICE);
  CHECK(plan->OnCall("cuInit", absl::Milliseconds(19999)).error == CUDA_ERROR_NO_DEVICE);
  CHECK(plan->OnCall("cuInit", absl::Seconds(20)).error == CUDA_SUCCESS);
}

TEST_CASE("items add up: delays are summed and the first error is answered") {
  const auto plan = Plan("cuMemMap=+1s, cuMemMap@2=+2s, cuMemMap@2=UNKNOWN, cuMemMap=OUT_OF_MEMORY");
  const CallFault first = plan->OnCall("cuMemMap", kAtOnce);
  const CallFault second = plan->OnCall("cuMemMap", kAtOnce);
  CHECK(first.delay == absl::Seconds(1));
  CHECK(first.error == CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(second.delay == absl::Seconds(3));
  CHECK(second.error == CUDA_ERROR_UNKNOWN);
}

TEST_CASE("the example of the manual is understood") {
  const auto plan = Plan(
      "cuMemCreate@3=OUT_OF_MEMORY,cuMemUnmap=+500ms,cuMemcpyHtoDAsync@10=ILLEGAL_ADDRESS,cuInit<20s=NO_DEVICE,"
      "attr:VMM=0,pin_limit=1GiB");
  CHECK(plan->Attribute("VMM") == 0);
  CHECK_FALSE(plan->Attribute("POSIX_FD").has_value());
  CHECK(plan->pin_limit_bytes() == 1073741824u);
  for (int call = 1; call < 10; ++call) CHECK(plan->OnCall("cuMemcpyHtoDAsync", kAtOnce).error == CUDA_SUCCESS);
  CHECK(plan->OnCall("cuMemcpyHtoDAsync", kAtOnce).error == CUDA_ERROR_ILLEGAL_ADDRESS);
}

TEST_CASE("what is wrong with an item is said, with the item") {
  const auto [spec, names] = GENERATE(table<std::string, std::string>({
      {"cuMemCreate", "no '='"},
      {"cuMemCreate@0=OUT_OF_MEMORY", "\"0\""},
      {"cuMemCreate@x=OUT_OF_MEMORY", "\"x\""},
      {"cuMemCreate@=OUT_OF_MEMORY", "\"\""},
      {"cuMemCreat=OUT_OF_MEMORY", "\"cuMemCreat\""},
      {"cuMemGetInfo_v2=UNKNOWN", "\"cuMemGetInfo_v2\""},
      {"cuMemCreate=OUT_OF_MEMRY", "CUDA_ERROR_OUT_OF_MEMRY"},
      {"cuMemCreate=SUCCESS", "CUDA_ERROR_SUCCESS"},
      {"cuMemCreate=", "CUDA_ERROR_"},
      {"cuMemCreate=+5", "5"},
      {"cuMemCreate=+-5s", "-5s"},
      {"cuInit<20=NO_DEVICE", "20"},
      {"attr:VMM=2", "0 or 1"},
      {"attr:SPEED=1", "\"SPEED\""},
      {"pin_limit=1 lot", "lot"},
      {"cuMemMap=UNKNOWN,", "no '='"},
  }));
  const absl::Status status = FaultPlan::Parse("cuMemRelease@1=UNKNOWN," + spec).status();
  const std::string message(status.message());
  INFO(spec << " -> " << message);
  CHECK(absl::IsInvalidArgument(status));
  CHECK(ReasonOf(status) == "BAD_FAULTS");
  CHECK(message.find(names) != std::string::npos);
  CHECK(message.find("cuMemRelease") == std::string::npos);
}

}  // namespace residency
