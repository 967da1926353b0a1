// SPDX-License-Identifier: Apache-2.0
//
// A lease is a process's hold on a model: addresses that stay, and weights under them for as long as the broker can
// spare the memory. Code that touches the weights does so inside a Use.
//
//   auto lease = client->Activate("flux", {});
//   const LeaseTensor* weight = lease->Find("transformer.x_embedder.weight");
//   {
//     auto use = lease->Use({.streams = {&stream, 1}});   // waits while the model is off its GPU
//     ... launch kernels on `stream` that read weight->address ...
//   }                                                     // may end before the kernels do
//
// Threads: any. Lease and Use objects belong to one thread at a time; a Use ends on the thread that began it. Leases
// and uses end before the Client they came from. A lease may be destroyed inside a use of itself: it then goes when
// the last use has ended.
#ifndef RESIDENCY_CLIENT_LEASE_H_
#define RESIDENCY_CLIENT_LEASE_H_

#include <cuda.h>

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/phase.h"

namespace residency {

class LeasePages;
class Reader;
struct LeaseRecord;

// A tensor of the model's table.
struct TensorEntry {
  std::string name;
  std::string component;
  std::string dtype;  // the safetensors format's spelling
  std::vector<uint64_t> shape;
  uint64_t bytes = 0;
  uint64_t device_offset = 0;  // from the start of the model's span
};

struct TensorTable {
  uint64_t layout_digest = 0;
  uint64_t span_bytes = 0;
  std::vector<TensorEntry> tensors;  // by component, then in file order
};

struct LeaseTensor : TensorEntry {
  CUdeviceptr address = 0;  // good for the life of the lease; read it inside a Use only
};

struct UseOptions {
  absl::Time deadline = absl::InfiniteFuture();
  // Those whose work will touch the weights; none: any stream of the context. Each outlives the lease, or is dropped
  // with Lease::Forget before it is destroyed.
  std::span<const CUstream> streams = {};
};

// A span of code in which the weights stay where they are, until the work that it gave to its streams is done.
class Use {
 public:
  Use(Use&& other) noexcept : pages_(std::exchange(other.pages_, nullptr)) {}
  Use& operator=(Use&& other) noexcept {
    std::swap(pages_, other.pages_);
    return *this;
  }
  ~Use();

 private:
  friend class Lease;
  explicit Use(LeasePages* pages) : pages_(pages) {}

  LeasePages* pages_;
};

class Lease {
 public:
  // For Client: joins a lease that `reader` has claimed with the table of its model.
  // `phases` outlives the lease; nullptr where the model is held.
  // FAILED_PRECONDITION/LAYOUT_MISMATCH where they are not of one layout; the claim is given back then.
  static absl::StatusOr<Lease> Make(Reader& reader, LeaseRecord& record, TensorTable table,
                                    PhaseCalls* phases = nullptr);

  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&& other) noexcept;
  // Ends the lease: asks the daemon, gives the memory back when it says so, and returns when it has ended the lease.
  // Waits for the device work of past uses; where a use is still under way it returns, and the lease goes when that
  // ends. A daemon that does not answer is waited for kRetirePatience.
  ~Lease();

  // By name where one tensor only has it, or by "component/name". nullptr: there is none.
  const LeaseTensor* Find(std::string_view tensor) const;
  const std::vector<LeaseTensor>& tensors() const { return tensors_; }
  const std::string& model() const;
  const std::string& device_uuid() const;
  uint64_t id() const;
  // Counts the activations that put memory under the addresses.
  uint64_t generation() const;

  // Begins a use; waits while the model is off its GPU. A thread may begin another one inside it. Without contention
  // this is one atomic addition and no system call.
  //  DEADLINE_EXCEEDED/DEADLINE; ABORTED/UNLOADED, RELEASED: the lease is over; ABORTED/REVOKED: its memory was taken
  //  by force; UNAVAILABLE/DAEMON_GONE: the daemon has hung up, the weights can still be read until the lease goes;
  //  UNAVAILABLE/DEVICE_LOST, RESOURCE_EXHAUSTED/GPU_MEMORY, ...: the cells could not be mapped.
  absl::StatusOr<residency::Use> Use(const UseOptions& options = {});

  // Whether the model goes by phases: then nothing is under the addresses, and Use waits, outside a phase.
  bool phased() const { return phases_ != nullptr; }

  // Brings a component of a phased model onto the GPU, and takes off the one whose phase this lease was in (see
  // phase.h). Leases of several clients that want the same component share it; while others are in another one's phase
  // this waits.
  //  FAILED_PRECONDITION/NOT_PHASED; the refusals of the call BeginPhase; DEADLINE_EXCEEDED/DEADLINE; what Use says of
  //  a lease that is over.
  absl::StatusOr<Phase> BeginPhase(std::string_view component, const PhaseOptions& options = {});

  // Drops a stream that an earlier use named. Its work on the weights must be done.
  void Forget(CUstream stream);

  // Copies bytes [offset, offset + out.size()) of `tensor` from the device, inside a use. OUT_OF_RANGE/OUT_OF_RANGE.
  absl::Status Read(const LeaseTensor& tensor, uint64_t offset, std::span<uint8_t> out,
                    absl::Time deadline = absl::InfiniteFuture());
  // All of it; `out` has tensor.bytes.
  absl::Status ReadTensor(const LeaseTensor& tensor, void* out);

 private:
  Lease(Reader& reader, LeaseRecord& record, PhaseCalls* phases)
      : reader_(&reader), record_(&record), phases_(phases) {}
  void AddTensors(TensorTable table);
  absl::Status WhyOutside(absl::Time deadline, bool timed_out) const;

  Reader* reader_;
  LeaseRecord* record_;  // nullptr once moved from
  PhaseCalls* phases_;
  std::vector<LeaseTensor> tensors_;
  std::map<std::string, size_t, std::less<>> by_name_;  // into tensors_; kAmbiguous where several have the name
};

}  // namespace residency

#endif  // RESIDENCY_CLIENT_LEASE_H_
