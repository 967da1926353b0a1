// SPDX-License-Identifier: Apache-2.0
#include "daemon/socket_group.h"

#include <grp.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

constexpr char kGroupName[] = "residency";

absl::StatusOr<std::optional<gid_t>> FindGroup(const std::string& name) {
  // A group with very many members needs more.
  std::vector<char> buffer(4096);
  while (true) {
    group entry{};
    group* found = nullptr;
    const int error = getgrnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &found);
    if (error == ERANGE) buffer.resize(buffer.size() * 2);
    if (error == ERANGE || error == EINTR) continue;
    if (found != nullptr) return found->gr_gid;
    // So a source says, among other ways, that it does not have it (getgrnam(3)).
    if (error == 0 || error == ENOENT || error == ESRCH || error == EBADF || error == EPERM) return std::nullopt;
    return ErrnoStatus(error, absl::StrCat("looking for the group '", name, "'"));
  }
}

}  // namespace

absl::StatusOr<gid_t> ParseGroup(const std::string& text) {
  const auto found = FindGroup(text);
  if (!found.ok()) return found.status();
  if (found->has_value()) return **found;
  uint32_t number = 0;
  // The largest number is the kernel's word for no change.
  if (absl::SimpleAtoi(text, &number) && number != std::numeric_limits<uint32_t>::max()) return number;
  return Refuse(absl::StatusCode::kNotFound, "NO_SUCH_GROUP", absl::StrCat("there is no group '", text, "'"));
}

absl::StatusOr<gid_t> DefaultSocketGroup() {
  if (geteuid() != 0) return getegid();
  const auto found = FindGroup(kGroupName);
  if (!found.ok()) return found.status();
  return found->value_or(getegid());
}

absl::Status TakeGroup(gid_t group) {
  if (group == getegid()) return absl::OkStatus();
  // The kernel takes core dumps, and reading our own /proc entries, from a process whose group changes.
  const bool dumpable = prctl(PR_GET_DUMPABLE) == 1;
  if (setresgid(group, group, group) != 0) {
    return Refuse(absl::StatusCode::kPermissionDenied, "SOCKET_GROUP",
                  absl::StrCat("this process may not take the group ", group, ", which its sockets are to have (",
                               std::string(ErrnoStatus(errno, "setresgid").message()),
                               "); start it with that group, or with --socket_group ", getegid()));
  }
  if (dumpable) (void)prctl(PR_SET_DUMPABLE, 1);
  return absl::OkStatus();
}

}  // namespace residency
