// SPDX-License-Identifier: Apache-2.0
//
// Waiting that ends early, but cleanly, with SIGINT, SIGTERM or the end of standard input.
#ifndef RESIDENCY_CLIENT_CTL_INTERRUPTION_H_
#define RESIDENCY_CLIENT_CTL_INTERRUPTION_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "mechanisms/unique_fd.h"

namespace residency {

// From Begin on the two signals do not end the process; they are remembered. One object per process, main thread.
class Interruption {
 public:
  static absl::StatusOr<std::unique_ptr<Interruption>> Begin();
  ~Interruption();
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;

  // Whether a signal has come.
  bool came() const;
  // Waits until `until` or a signal.
  void Wait(absl::Time until) const { WaitFor(until, /*or_input_ends=*/false); }
  // Waits until standard input ends or a signal comes. What is read there is dropped.
  void WaitForInputEnd() const { WaitFor(absl::InfiniteFuture(), /*or_input_ends=*/true); }

 private:
  explicit Interruption(UniqueFd signalled) : signalled_(std::move(signalled)) {}
  void WaitFor(absl::Time until, bool or_input_ends) const;

  const UniqueFd signalled_;  // an eventfd
};

}  // namespace residency

#endif  // RESIDENCY_CLIENT_CTL_INTERRUPTION_H_
