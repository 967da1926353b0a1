// SPDX-License-Identifier: Apache-2.0
#include "mechanisms/sim_cards.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

constexpr char kCardsHeader[] = "residency simulated cards 1";
constexpr char kLabelMagic[16] = "residency-memor";
constexpr uint64_t kLabelPageBytes = 4096;
constexpr uint32_t kMostDevices = 64;

// Stands in the page behind a memory file's bytes, so that a descriptor alone says what it is.
struct Label {
  char magic[16];
  SimCard::Uuid uuid;
  uint64_t bytes;
  std::array<int32_t, 32> holders;  // pids, the maker's first; 0 where there is none
};

// Contents of a card's lock file. The bound is at least what is in use: taking memory raises it, and only a count
// lowers it. So taking memory needs no count while the bound leaves room.
struct Ledger {
  uint64_t used_bound_bytes = 0;
  uint64_t next_id = 0;
};

absl::Status SystemError(absl::string_view what) {
  return absl::InternalError(absl::StrCat(what, ": ", std::strerror(errno)));
}

// Holds flock(LOCK_EX) on a file for a scope.
class FileLock {
 public:
  explicit FileLock(int fd) : fd_(fd) {
    while ((held_ = ::flock(fd_, LOCK_EX) == 0) == false && errno == EINTR) {
    }
  }
  ~FileLock() {
    if (held_) ::flock(fd_, LOCK_UN);
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  bool held() const { return held_; }

 private:
  const int fd_;
  bool held_ = false;
};

bool IsAlive(int32_t pid) { return pid != 0 && (::kill(pid, 0) == 0 || errno == EPERM); }

// The bytes in a name like m-BYTES-ID.
std::optional<uint64_t> BytesInName(absl::string_view name) {
  const std::vector<absl::string_view> parts = absl::StrSplit(name, '-');
  uint64_t bytes = 0;
  if (parts.size() != 3 || (parts[0] != "m" && parts[0] != "c") || !absl::SimpleAtoi(parts[1], &bytes)) {
    return std::nullopt;
  }
  return bytes;
}

// The modes are set apart from creation because the umask of whoever comes first must not shut out the group.
UniqueFd OpenShared(int folder, const char* name) {
  UniqueFd fd(::openat(folder, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0660));
  if (fd.valid()) {
    ::fchmod(fd.get(), 0660);
    return fd;
  }
  if (errno != EEXIST) return fd;
  return UniqueFd(::openat(folder, name, O_RDWR | O_CLOEXEC));
}

UniqueFd OpenFolder(int parent, const std::string& name) {
  if (::mkdirat(parent, name.c_str(), 0770) == 0) {
    ::fchmodat(parent, name.c_str(), 0770, 0);
  } else if (errno != EEXIST) {
    return UniqueFd();
  }
  return UniqueFd(::openat(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

struct Description {
  SimCard::Uuid uuid;
  uint64_t total_bytes;
};

std::optional<std::string> ReadWhole(int folder, const char* name) {
  UniqueFd fd(::openat(folder, name, O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return std::nullopt;
  std::string text;
  char buffer[4096];
  for (ssize_t got; (got = ::read(fd.get(), buffer, sizeof(buffer))) > 0;) text.append(buffer, got);
  return text;
}

absl::StatusOr<std::vector<Description>> ParseDescription(absl::string_view text) {
  std::vector<Description> cards;
  std::vector<absl::string_view> lines = absl::StrSplit(text, '\n', absl::SkipEmpty());
  if (lines.empty() || lines[0] != kCardsHeader) return absl::DataLossError("its description of the cards is damaged");
  for (size_t i = 1; i < lines.size(); ++i) {
    const std::vector<absl::string_view> words = absl::StrSplit(lines[i], ' ');
    Description card{};
    if (words.size() != 3 || words[0] != "card" || words[1].size() != 32 ||
        !absl::SimpleAtoi(words[2], &card.total_bytes)) {
      return absl::DataLossError(absl::StrCat("its description of the cards is damaged at \"", lines[i], "\""));
    }
    const std::string uuid = absl::HexStringToBytes(words[1]);
    std::copy(uuid.begin(), uuid.end(), card.uuid.begin());
    cards.push_back(card);
  }
  return cards;
}

// Written under another name and renamed, so that a description is whole or absent.
absl::Status WriteDescription(int folder, uint32_t devices, uint64_t device_bytes) {
  std::string text = absl::StrCat(kCardsHeader, "\n");
  for (uint32_t i = 0; i < devices; ++i) {
    SimCard::Uuid uuid;
    if (::getrandom(uuid.data(), uuid.size(), 0) != static_cast<ssize_t>(uuid.size())) return SystemError("getrandom");
    const absl::string_view bytes(reinterpret_cast<const char*>(uuid.data()), uuid.size());
    absl::StrAppend(&text, "card ", absl::BytesToHexString(bytes), " ", device_bytes, "\n");
  }
  UniqueFd fd = OpenShared(folder, "cards.new");
  if (!fd.valid() || ::ftruncate(fd.get(), 0) != 0 ||
      ::pwrite(fd.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()) ||
      ::renameat(folder, "cards.new", folder, "cards") != 0) {
    return SystemError("writing the description of the cards");
  }
  return absl::OkStatus();
}

}  // namespace

SimCard::SimCard(int index, const Uuid& uuid, uint64_t total_bytes, UniqueFd folder, UniqueFd lock)
    : index_(index), uuid_(uuid), total_bytes_(total_bytes), folder_(std::move(folder)), lock_(std::move(lock)) {}

absl::StatusOr<UniqueFd> SimCard::Take(Kind kind, uint64_t bytes) {
  std::lock_guard guard(mutex_);
  FileLock lock(lock_.get());
  if (!lock.held()) return SystemError("locking the card");
  Ledger ledger;
  const bool known = ::pread(lock_.get(), &ledger, sizeof(ledger), 0) == sizeof(ledger);
  if (bytes > total_bytes_) return absl::ResourceExhaustedError("larger than the card");
  if (!known || ledger.used_bound_bytes > total_bytes_ - bytes) {
    absl::StatusOr<uint64_t> used_bytes = CountUsedBytes();
    if (!used_bytes.ok()) return used_bytes.status();
    ledger.used_bound_bytes = *used_bytes;
    if (*used_bytes > total_bytes_ - bytes) return absl::ResourceExhaustedError("the card is full");
  }
  absl::StatusOr<UniqueFd> file = MakeFile(kind, bytes, ledger.next_id);
  if (!file.ok()) return file.status();
  ledger.used_bound_bytes += bytes;
  // A file that no bound covers would be given away twice; it goes with its descriptor.
  if (::pwrite(lock_.get(), &ledger, sizeof(ledger), 0) != sizeof(ledger)) return SystemError("writing the ledger");
  return file;
}

absl::StatusOr<uint64_t> SimCard::FreeBytes() {
  std::lock_guard guard(mutex_);
  FileLock lock(lock_.get());
  if (!lock.held()) return SystemError("locking the card");
  absl::StatusOr<uint64_t> used_bytes = CountUsedBytes();
  if (!used_bytes.ok()) return used_bytes.status();
  return total_bytes_ - std::min(*used_bytes, total_bytes_);
}

absl::StatusOr<uint64_t> SimCard::CountUsedBytes() {
  uint64_t used_bytes = 0;
  if (auto status = ForEachAlive([&](Kind, uint64_t bytes, int) { used_bytes += bytes; }); !status.ok()) return status;
  return used_bytes;
}

absl::StatusOr<std::map<int64_t, uint64_t>> SimCard::UsedByProcess() {
  std::lock_guard guard(mutex_);
  FileLock lock(lock_.get());
  if (!lock.held()) return SystemError("locking the card");
  std::map<int64_t, uint64_t> used_bytes;
  const absl::Status status = ForEachAlive([&](Kind kind, uint64_t bytes, int fd) {
    Label label;
    if (fd < 0 || ::pread(fd, &label, sizeof(label), kind == Kind::kMemory ? bytes : 0) != sizeof(label)) return;
    const auto holder = std::find_if(label.holders.begin(), label.holders.end(), IsAlive);
    if (holder != label.holders.end()) used_bytes[*holder] += bytes;
  });
  if (!status.ok()) return status;
  return used_bytes;
}

void SimCard::Join(int fd) { ReplaceHolder(fd, 0, ::getpid()); }
void SimCard::Leave(int fd) { ReplaceHolder(fd, ::getpid(), 0); }

void SimCard::ReplaceHolder(int fd, int32_t from, int32_t to) {
  std::lock_guard guard(mutex_);
  FileLock lock(lock_.get());
  struct stat info;
  Label label;
  if (!lock.held() || ::fstat(fd, &info) != 0 || info.st_size < static_cast<off_t>(kLabelPageBytes)) return;
  const off_t at = info.st_size - static_cast<off_t>(kLabelPageBytes);
  if (::pread(fd, &label, sizeof(label), at) != sizeof(label)) return;
  const auto found = std::find_if(label.holders.begin(), label.holders.end(),
                                  [from](int32_t pid) { return pid == from || (from == 0 && !IsAlive(pid)); });
  if (found == label.holders.end()) return;
  *found = to;
  (void)!::pwrite(fd, &label, sizeof(label), at);
}

absl::Status SimCard::ForEachAlive(const std::function<void(Kind, uint64_t, int)>& each) {
  const int listing = ::openat(folder_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (listing < 0) return SystemError("listing the card");
  DIR* directory = ::fdopendir(listing);  // Owns `listing` from here.
  if (directory == nullptr) {
    ::close(listing);
    return SystemError("listing the card");
  }
  absl::Status status;
  while (const dirent* entry = ::readdir(directory)) {
    const std::optional<uint64_t> bytes = BytesInName(entry->d_name);
    if (!bytes) continue;
    UniqueFd probe(::openat(folder_.get(), entry->d_name, O_RDONLY | O_CLOEXEC));
    if (!probe.valid() && errno != EACCES) {
      status = SystemError("counting the card's memory");
      break;
    }
    // What may not be opened cannot be shown to be dead.
    if (!probe.valid() || ::flock(probe.get(), LOCK_EX | LOCK_NB) != 0) {
      each(entry->d_name[0] == 'm' ? Kind::kMemory : Kind::kCharge, *bytes, probe.get());
    } else {
      ::unlinkat(folder_.get(), entry->d_name, 0);
    }
  }
  ::closedir(directory);
  return status;
}

absl::StatusOr<UniqueFd> SimCard::MakeFile(Kind kind, uint64_t bytes, uint64_t& next_id) {
  UniqueFd file;
  std::string name;
  do {
    name = absl::StrFormat("%c-%d-%016x", kind == Kind::kMemory ? 'm' : 'c', bytes, next_id++);
    file = UniqueFd(::openat(folder_.get(), name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0660));
  } while (!file.valid() && errno == EEXIST);
  // Nobody counts before the card's lock is let go, so the file is seen only once it is whole and locked.
  bool made = file.valid() && ::flock(file.get(), LOCK_SH) == 0 && ::fchmod(file.get(), 0660) == 0;
  if (made) {
    const bool memory = kind == Kind::kMemory;
    Label label{};
    std::memcpy(label.magic, kLabelMagic, sizeof(label.magic));
    label.uuid = uuid_;
    label.bytes = bytes;
    label.holders[0] = ::getpid();
    made = (!memory || ::ftruncate(file.get(), bytes + kLabelPageBytes) == 0) &&
           ::pwrite(file.get(), &label, sizeof(label), memory ? bytes : 0) == sizeof(label);
  }
  if (!made) {
    absl::Status status = SystemError("making device memory");
    if (file.valid()) ::unlinkat(folder_.get(), name.c_str(), 0);
    return status;
  }
  return file;
}

absl::StatusOr<std::unique_ptr<SimCards>> SimCards::Open(const std::string& directory, uint32_t devices,
                                                         uint64_t device_bytes) {
  const auto system_error = [&](absl::string_view what) {
    return ErrnoStatus(errno, absl::StrCat("simulated cards in ", directory, ": ", what));
  };
  UniqueFd root = OpenFolder(AT_FDCWD, directory);
  if (!root.valid()) return system_error("opening the directory");
  UniqueFd lock_file = OpenShared(root.get(), "lock");
  if (!lock_file.valid()) return system_error("opening its lock");
  FileLock lock(lock_file.get());
  if (!lock.held()) return system_error("locking it");

  std::optional<std::string> text = ReadWhole(root.get(), "cards");
  if (!text) {
    if (devices == 0 || devices > kMostDevices || device_bytes < kSimGranuleBytes) {
      return absl::InvalidArgumentError(
          absl::StrFormat("simulated cards in %s: %d devices of %d bytes; known are 1 to %d of at least 2 MiB",
                          directory, devices, device_bytes, kMostDevices));
    }
    if (absl::Status status = WriteDescription(root.get(), devices, device_bytes); !status.ok()) {
      return absl::Status(status.code(), absl::StrCat("simulated cards in ", directory, ": ", status.message()));
    }
    text = ReadWhole(root.get(), "cards");
    if (!text) return system_error("reading the description of the cards");
  }
  absl::StatusOr<std::vector<Description>> described = ParseDescription(*text);
  if (!described.ok()) {
    return absl::DataLossError(absl::StrCat("simulated cards in ", directory, ": ", described.status().message()));
  }
  auto cards = std::make_unique<SimCards>();
  for (const Description& card : *described) {
    const int index = static_cast<int>(cards->cards_.size());
    UniqueFd folder = OpenFolder(root.get(), absl::StrCat(index));
    UniqueFd card_lock = folder.valid() ? OpenShared(folder.get(), "lock") : UniqueFd();
    if (!card_lock.valid()) return system_error(absl::StrCat("opening card ", index));
    cards->cards_.push_back(
        std::make_unique<SimCard>(index, card.uuid, card.total_bytes, std::move(folder), std::move(card_lock)));
  }
  return cards;
}

std::optional<SimLabel> SimCards::LabelOf(int fd) const {
  struct stat info;
  Label label;
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size < static_cast<off_t>(kLabelPageBytes)) {
    return std::nullopt;
  }
  const uint64_t bytes = static_cast<uint64_t>(info.st_size) - kLabelPageBytes;
  if (::pread(fd, &label, sizeof(label), bytes) != sizeof(label) || label.bytes != bytes ||
      std::memcmp(label.magic, kLabelMagic, sizeof(label.magic)) != 0) {
    return std::nullopt;
  }
  for (const std::unique_ptr<SimCard>& card : cards_) {
    if (card->uuid() == label.uuid) return SimLabel{card->index(), bytes};
  }
  return std::nullopt;
}

}  // namespace residency
