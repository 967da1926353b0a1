// SPDX-License-Identifier: Apache-2.0
#include "tests/fault_driver.h"

#include <cstring>
#include <iterator>
#include <tuple>

#include "mechanisms/units.h"
#include "tests/test_driver.h"

namespace residency {
namespace {

struct State {
  std::array<uint64_t, kDriverCallCount> calls{};
  std::vector<DriverFault> faults;
  uint64_t hits = 0;
  DriverHoldings holdings;
};

State& TheState() {
  static State state;
  return state;
}

// Counts the call; the error it fails with.
std::optional<CUresult> Fate(DriverCall call) {
  State& state = TheState();
  const uint64_t number = ++state.calls[call];
  for (const DriverFault& fault : state.faults) {
    if (fault.call != call || number < fault.first || number > fault.last) continue;
    ++state.hits;
    return fault.error;
  }
  return std::nullopt;
}

// What a call that was made, or refused, changes in the holdings.
template <DriverCall call, typename Arguments>
void Note(const Arguments& arguments, bool refused) {
  DriverHoldings& holdings = TheState().holdings;
  if constexpr (call == k_cuMemCreate) {
    if (!refused) holdings.handles[*std::get<0>(arguments)] = {std::get<1>(arguments), 1, 0};
  } else if constexpr (call == k_cuMemRetainAllocationHandle) {
    if (!refused) ++holdings.handles[*std::get<0>(arguments)].references;
  } else if constexpr (call == k_cuMemRelease) {
    const auto handle = holdings.handles.find(std::get<0>(arguments));
    if (handle == holdings.handles.end()) return;
    if (refused) {
      ++handle->second.refused;
    } else if (--handle->second.references == 0) {
      holdings.handles.erase(handle);
    }
  } else if constexpr (call == k_cuMemAddressReserve) {
    if (!refused) holdings.ranges[*std::get<0>(arguments)] = std::get<1>(arguments);
  } else if constexpr (call == k_cuMemAddressFree) {
    if (!refused) holdings.ranges.erase(std::get<0>(arguments));
    if (refused) ++holdings.refused_ranges;
  } else if constexpr (call == k_cuMemcpyHtoDAsync) {
    const auto& [to, from, bytes, stream] = arguments;
    if (refused || bytes < kMiB / 4 || !Fate(kFlippedCopy)) return;
    const uint64_t place = bytes / 2 + 4096 + 8;
    uint64_t word = 0;
    std::memcpy(&word, static_cast<const char*>(from) + place, sizeof(word));
    word ^= 1;
    // From memory that is not page-locked: it is done when this returns, after the copy before it.
    (void)TestDriver().cuMemcpyHtoDAsync(to + place, &word, sizeof(word), stream);
  }
}

template <DriverCall call, auto Entry, typename Function>
struct Wrapped;

template <DriverCall call, auto Entry, typename... Arguments>
struct Wrapped<call, Entry, CUresult (*)(Arguments...)> {
  static CUresult Call(Arguments... arguments) {
    const std::tuple<Arguments...> noted(arguments...);
    if (const auto error = Fate(call)) {
      Note<call>(noted, true);
      return *error;
    }
    const CUresult result = (TestDriver().*Entry)(arguments...);
    if (result == CUDA_SUCCESS) Note<call>(noted, false);
    return result;
  }
};

Driver MakeTable() {
  Driver driver;
#define RESIDENCY_WRAP(name) driver.name = Wrapped<k_##name, &Driver::name, decltype(driver.name)>::Call;
  RESIDENCY_DRIVER_CALLS(RESIDENCY_WRAP)
#undef RESIDENCY_WRAP
  return driver;
}

}  // namespace

std::string_view DriverCallName(DriverCall call) {
#define RESIDENCY_CALL_NAME(name) #name,
  static constexpr std::string_view kNames[] = {RESIDENCY_DRIVER_CALLS(RESIDENCY_CALL_NAME) "a flipped copy"};
#undef RESIDENCY_CALL_NAME
  return kNames[call];
}

uint64_t DriverHoldings::held_bytes() const {
  uint64_t bytes = 0;
  for (const auto& [handle, what] : handles) bytes += what.references > what.refused ? what.bytes : 0;
  return bytes;
}

size_t DriverHoldings::held_handles() const {
  size_t held = 0;
  for (const auto& [handle, what] : handles) held += what.references > what.refused ? 1 : 0;
  return held;
}

const Driver& FaultDriver::Table() {
  static const Driver driver = MakeTable();
  return driver;
}

void FaultDriver::Reset() {
  Disarm();
  TheState().calls.fill(0);
  TheState().hits = 0;
}

void FaultDriver::Arm(const DriverFault& fault) { TheState().faults.push_back(fault); }
void FaultDriver::Disarm() { TheState().faults.clear(); }
uint64_t FaultDriver::calls(DriverCall call) { return TheState().calls[call]; }
uint64_t FaultDriver::hits() { return TheState().hits; }
const DriverHoldings& FaultDriver::holdings() { return TheState().holdings; }

void FaultDriver::TakeBackRefused() {
  DriverHoldings& holdings = TheState().holdings;
  for (auto entry = holdings.handles.begin(); entry != holdings.handles.end();) {
    auto& [handle, what] = *entry;
    for (; what.refused > 0; --what.refused, --what.references) (void)TestDriver().cuMemRelease(handle);
    entry = what.references == 0 ? holdings.handles.erase(entry) : std::next(entry);
  }
  holdings.refused_ranges = 0;
}

CUresult FittingError(DriverCall call) {
  switch (call) {
    case k_cuMemCreate:
    case k_cuMemAlloc:
    case k_cuMemAddressReserve:
    case k_cuStreamCreate:
      return CUDA_ERROR_OUT_OF_MEMORY;
    case k_cuMemRetainAllocationHandle:
      // A bad value is how this one says that nothing is mapped, which is an answer and no failure.
      return CUDA_ERROR_OPERATING_SYSTEM;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

}  // namespace residency
