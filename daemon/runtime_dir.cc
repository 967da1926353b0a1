// SPDX-License-Identifier: Apache-2.0
#include "daemon/runtime_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

constexpr size_t kMaxSocketPathBytes = 107;  // sun_path, without its terminator

// Makes what is missing of `path`, writable by nobody but its owner whatever the umask: who may write in the folder of
// a socket may put another socket in its place.
absl::Status MakeDirectories(const std::filesystem::path& path) {
  std::filesystem::path made;
  for (const std::filesystem::path& part : path) {
    made /= part;
    if (part.empty() || mkdir(made.c_str(), 0755) == 0 || errno == EEXIST) continue;
    const int error = errno;
    std::error_code ignored;
    // A folder above may be read-only, or not ours, and there.
    if (std::filesystem::is_directory(made, ignored)) continue;
    return ErrnoStatus(error, absl::StrCat("making the runtime directory ", path.string()));
  }
  return absl::OkStatus();
}

}  // namespace

std::string DefaultRuntimeDir() {
  if (geteuid() == 0) return "/run/residency";
  if (const char* base = std::getenv("XDG_RUNTIME_DIR"); base != nullptr && *base != '\0') {
    return absl::StrCat(base, "/residency");
  }
  return "";
}

absl::StatusOr<UniqueFd> ClaimRuntimeDir(const std::string& path) {
  if (path.empty()) {
    return Refuse(absl::StatusCode::kInvalidArgument, "NO_RUNTIME_DIR",
                  "$XDG_RUNTIME_DIR is not set; say with --runtime_dir where the sockets are to be");
  }
  if (path.size() + sizeof("/pages.sock") - 1 > kMaxSocketPathBytes) {
    return Refuse(absl::StatusCode::kInvalidArgument, "PATH_TOO_LONG",
                  absl::StrCat("the runtime directory '", path, "' is too long: a socket's path has at most ",
                               kMaxSocketPathBytes, " bytes"));
  }
  if (auto status = MakeDirectories(path); !status.ok()) return status;
  const std::string lock_path = absl::StrCat(path, "/lock");
  UniqueFd lock(open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0640));
  if (!lock.valid()) return ErrnoStatus(errno, absl::StrCat("opening ", lock_path));
  if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return ErrnoStatus(errno, absl::StrCat("locking ", lock_path));
    std::array<char, 32> pid{};
    (void)!pread(lock.get(), pid.data(), pid.size() - 1, 0);
    return Refuse(absl::StatusCode::kAlreadyExists, "RUNNING",
                  absl::StrCat("a residencyd runs on ", path, " already, pid ",
                               std::string(absl::StripAsciiWhitespace(pid.data()))));
  }
  const std::string pid = absl::StrCat(getpid(), "\n");
  if (ftruncate(lock.get(), 0) != 0 || pwrite(lock.get(), pid.data(), pid.size(), 0) < 0) {
    return ErrnoStatus(errno, absl::StrCat("writing ", lock_path));
  }
  return lock;
}

}  // namespace residency
