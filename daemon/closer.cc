// SPDX-License-Identifier: Apache-2.0
#include "daemon/closer.h"

#include <sys/socket.h>

#include <iterator>
#include <system_error>
#include <thread>
#include <utility>

namespace residency {

void Closer::Close(std::vector<UniqueFd> descriptors) {
  waiting_.insert(waiting_.end(), std::make_move_iterator(descriptors.begin()),
                  std::make_move_iterator(descriptors.end()));
  if (waiting_.empty() || *threads_ >= kMaxThreads) return;
  auto closing = std::make_unique<std::vector<UniqueFd>>(std::exchange(waiting_, {}));
  ++*threads_;
  try {
    // The thread alone owns them: whoever lets go last waits.
    std::thread([all = closing.get(), threads = threads_] {
      delete all;
      --*threads;
    }).detach();
    (void)closing.release();
  } catch (const std::system_error&) {
    waiting_ = std::move(*closing);
    --*threads_;
  }
}

void Closer::CloseConnection(UniqueFd connection) {
  (void)shutdown(connection.get(), SHUT_RDWR);  // from now on nothing more comes in
  // Not looked at first: a packet without payload reads as nothing, whatever lies behind it.
  std::vector<UniqueFd> one;
  one.push_back(std::move(connection));
  Close(std::move(one));
}

}  // namespace residency
