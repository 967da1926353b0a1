// SPDX-License-Identifier: Apache-2.0
//
// A recording holds all that the decision core was told, and what it ordered, so that the same can be decided again
// without a device, a socket or a client: proto/recording.proto. The broker writes one, `residencyd --replay` reads it.
#ifndef RESIDENCY_DAEMON_RECORDING_H_
#define RESIDENCY_DAEMON_RECORDING_H_

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/arbiter.h"
#include "daemon/events.h"
#include "mechanisms/unique_fd.h"
#include "proto/recording.pb.h"

namespace residency {

// Writes a recording. Every record is with the kernel when the call returns, so that it outlives this process, however
// that ends; it is not forced to the disk. Where a record cannot be written the recording ends before it, one line of
// the log says so, and further calls do nothing. On the decision loop.
class Recorder {
 public:
  // Makes the file `path`, for its owner alone. ALREADY_EXISTS/FILE_EXISTS where there is something of that name;
  // the system's error, with the path, where it cannot be made or written.
  static absl::StatusOr<std::unique_ptr<Recorder>> Create(const std::string& path, const std::string& daemon_version,
                                                          const ArbiterOptions& options);

  // Before Arbiter::Step, so that an event on which the core dies is in the file.
  void Begin(const Event& event, absl::Time now);
  // After it, before the effects are carried out.
  void End(const std::vector<Effect>& effects);

  // Why the recording ended, or OK.
  const absl::Status& status() const { return status_; }

 private:
  Recorder(std::string path, UniqueFd file) : path_(std::move(path)), file_(std::move(file)) {}
  void Write(const recording::v1::Record& record);
  void Stop(absl::Status status);

  const std::string path_;
  UniqueFd file_;
  uint64_t written_bytes_ = 0;
  absl::Status status_;
};

// Takes the steps of the recording `path` again and tells `out` the result: how many steps and effects, all decided
// the same, or the first step that was not, with both sides. True where all were. A last record that is cut off, or a
// last step without its effects, is what a killed daemon leaves: told, and no fault. INVALID_ARGUMENT/NOT_A_RECORDING
// for a file that is none, or is of another format; DAMAGED where one breaks off in its middle; the system's error
// where it cannot be read. Any thread.
absl::StatusOr<bool> Replay(const std::string& path, std::ostream& out);

}  // namespace residency

#endif  // RESIDENCY_DAEMON_RECORDING_H_
