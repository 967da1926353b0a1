// SPDX-License-Identifier: Apache-2.0
#include "daemon/recording.h"

#include <fcntl.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/util/delimited_message_util.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/recording_codec.h"
#include "daemon/recording_format.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

// Whether a replay gets the layout that the core has here.
bool Restores(const RegisterRequested& event, const recording::v1::Event& message) {
  const absl::StatusOr<Event> restored = FromProto(message);
  if (!restored.ok()) return false;
  const std::vector<LayoutCell>& cells = std::get<RegisterRequested>(*restored).layout.cells;
  return std::equal(cells.begin(), cells.end(), event.layout.cells.begin(), event.layout.cells.end(),
                    [](const LayoutCell& a, const LayoutCell& b) {
                      return a.device_offset == b.device_offset && a.bytes == b.bytes && a.component == b.component;
                    });
}

}  // namespace

absl::StatusOr<std::unique_ptr<Recorder>> Recorder::Create(const std::string& path, const std::string& daemon_version,
                                                           const ArbiterOptions& options) {
  UniqueFd file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file.valid() && errno == EEXIST) {
    return Refuse(absl::StatusCode::kAlreadyExists, Refusal{.reason = "FILE_EXISTS", .file = path},
                  absl::StrCat(path, " exists; a recording is a new file"));
  }
  if (!file.valid()) return ErrnoStatus(errno, absl::StrCat("making the recording ", path));
  std::unique_ptr<Recorder> recorder(new Recorder(path, std::move(file)));
  recording::v1::Record record;
  recording::v1::Header& header = *record.mutable_header();
  header.set_magic(kRecordingMagic);
  header.set_format_version(kRecordingFormat);
  header.set_daemon_version(daemon_version);
  ToProto(options, *header.mutable_options());
  recorder->Write(record);
  if (!recorder->status().ok()) return recorder->status();
  return recorder;
}

void Recorder::Begin(const Event& event, absl::Time now) {
  if (!status_.ok()) return;
  recording::v1::Record record;
  ToProto(now, *record.mutable_step()->mutable_at());
  ToProto(event, *record.mutable_step()->mutable_event());
  if (const auto* registration = std::get_if<RegisterRequested>(&event);
      registration != nullptr && !Restores(*registration, record.step().event())) {
    return Stop(absl::InternalError(
        absl::StrCat("the cells of ", registration->name, " do not follow from the sizes of its components")));
  }
  Write(record);
}

void Recorder::End(const std::vector<Effect>& effects) {
  if (!status_.ok()) return;
  recording::v1::Record record;
  record.mutable_effects();
  for (const Effect& effect : effects) ToProto(effect, *record.mutable_effects()->add_effects());
  Write(record);
}

void Recorder::Write(const recording::v1::Record& record) {
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::util::SerializeDelimitedToZeroCopyStream(record, &stream);
  }
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t count = write(file_.get(), bytes.data() + done, bytes.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return Stop(ErrnoStatus(errno, absl::StrCat("writing ", path_)));
    done += static_cast<size_t>(count);
  }
  written_bytes_ += bytes.size();
}

void Recorder::Stop(absl::Status status) {
  status_ = std::move(status);
  // So that it ends with a whole record. Where even that fails, a replay finds the last one cut off.
  (void)!ftruncate(file_.get(), static_cast<off_t>(written_bytes_));
  file_.reset();
  spdlog::error("the recording {} ends here, after {} bytes: {}", path_, written_bytes_, status_.ToString());
}

}  // namespace residency
