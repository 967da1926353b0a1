// SPDX-License-Identifier: Apache-2.0
//
// Closes descriptors that a client made, away from the decision loop: the last close of a socket that lingers, or of a
// file that somebody serves over FUSE or NFS, takes as long as its maker likes. For the decision loop.
#ifndef RESIDENCY_DAEMON_CLOSER_H_
#define RESIDENCY_DAEMON_CLOSER_H_

#include <atomic>
#include <memory>
#include <vector>

#include "mechanisms/unique_fd.h"

namespace residency {

class Closer {
 public:
  // Closes them soon, on a thread that nobody waits for, not even at the end of the process.
  void Close(std::vector<UniqueFd> descriptors);
  // Ends a connection at once for its peer. What the peer sent and nobody read may hold descriptors, too.
  void CloseConnection(UniqueFd connection);

 private:
  // With so many threads in somebody's close, what comes next stays open until one is done and more is closed.
  static constexpr int kMaxThreads = 64;

  std::vector<UniqueFd> waiting_;
  std::shared_ptr<std::atomic<int>> threads_ = std::make_shared<std::atomic<int>>(0);
};

}  // namespace residency

#endif  // RESIDENCY_DAEMON_CLOSER_H_
