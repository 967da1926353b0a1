// SPDX-License-Identifier: Apache-2.0
#include "daemon/notify.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "mechanisms/unique_fd.h"

namespace residency {

void NotifyManager(std::string_view state) {
  const char* name = std::getenv("NOTIFY_SOCKET");
  sockaddr_un address{};
  if (name == nullptr || *name == '\0' || std::strlen(name) >= sizeof(address.sun_path)) return;
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, name, std::strlen(name));
  const socklen_t length = offsetof(sockaddr_un, sun_path) + std::strlen(name);
  // "@name" is in the abstract namespace, whose names begin with a zero byte.
  if (address.sun_path[0] == '@') address.sun_path[0] = '\0';
  const UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return;
  (void)sendto(socket.get(), state.data(), state.size(), MSG_NOSIGNAL, reinterpret_cast<sockaddr*>(&address), length);
}

}  // namespace residency
