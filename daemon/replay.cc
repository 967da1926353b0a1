// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <google/protobuf/io/zero_copy_stream_impl.h>
#include <google/protobuf/util/delimited_message_util.h>

#include <algorithm>
#include <cerrno>
#include <optional>

#include "absl/strings/str_cat.h"
#include "daemon/recording.h"
#include "daemon/recording_codec.h"
#include "daemon/recording_format.h"
#include "mechanisms/refusal.h"
#include "mechanisms/version.h"

namespace residency {
namespace {

using google::protobuf::Message;
using recording::v1::Record;

enum class ReadResult { kRecord, kEnd, kCutOff, kDamaged };

// The records of a file, one after the other.
class RecordReader {
 public:
  explicit RecordReader(int file) : stream_(file) {}

  ReadResult Next(Record& record) {
    bool clean_end = false;
    record.Clear();
    if (google::protobuf::util::ParseDelimitedFromZeroCopyStream(&record, &stream_, &clean_end)) {
      return ReadResult::kRecord;
    }
    if (clean_end) return ReadResult::kEnd;
    // A record that is cut off is read to the end of the file, one that is none only to where it makes no sense.
    const void* rest = nullptr;
    int rest_bytes = 0;
    return stream_.Next(&rest, &rest_bytes) ? ReadResult::kDamaged : ReadResult::kCutOff;
  }
  int error() const { return stream_.GetErrno(); }

 private:
  google::protobuf::io::FileInputStream stream_;
};

std::string Text(const Message& message) { return message.ShortDebugString(); }

recording::v1::Effects EffectsOf(const std::vector<Effect>& effects) {
  recording::v1::Effects message;
  for (const Effect& effect : effects) ToProto(effect, *message.add_effects());
  return message;
}

// One line for each effect: in both, recorded only, decided now only.
void TellDifference(const recording::v1::Effects& recorded, const recording::v1::Effects& now, std::ostream& out) {
  for (int i = 0; i < std::max(recorded.effects_size(), now.effects_size()); ++i) {
    const std::string then_text = i < recorded.effects_size() ? Text(recorded.effects(i)) : "";
    const std::string now_text = i < now.effects_size() ? Text(now.effects(i)) : "";
    if (then_text == now_text && !then_text.empty()) {
      out << "  both:     " << then_text << "\n";
      continue;
    }
    if (!then_text.empty()) out << "  recorded: " << then_text << "\n";
    if (!now_text.empty()) out << "  now:      " << now_text << "\n";
  }
}

absl::Status NotARecording(const std::string& path, const std::string& why) {
  return Refuse(absl::StatusCode::kInvalidArgument, Refusal{.reason = "NOT_A_RECORDING", .file = path},
                absl::StrCat(path, " is no recording that can be replayed: ", why));
}

absl::Status Damaged(const std::string& path, uint64_t steps, const std::string& why) {
  return Refuse(absl::StatusCode::kInvalidArgument, Refusal{.reason = "DAMAGED", .file = path},
                absl::StrCat(path, " is damaged behind step ", steps, ": ", why));
}

absl::StatusOr<ArbiterOptions> ReadHeader(RecordReader& reader, const std::string& path, std::ostream& out) {
  Record record;
  const ReadResult result = reader.Next(record);
  if (reader.error() != 0) return ErrnoStatus(reader.error(), absl::StrCat("reading ", path));
  if (result != ReadResult::kRecord || record.header().magic() != kRecordingMagic) {
    return NotARecording(path, "it does not begin with a header");
  }
  const recording::v1::Header& header = record.header();
  if (header.format_version() != kRecordingFormat) {
    return NotARecording(path, absl::StrCat("its format is version ", header.format_version(),
                                            ", this residencyd reads version ", kRecordingFormat));
  }
  if (header.daemon_version() != kVersion) {
    out << "recorded by residencyd " << header.daemon_version() << ", replayed by " << kVersion << "\n";
  }
  return FromProto(header.options());
}

}  // namespace

absl::StatusOr<bool> Replay(const std::string& path, std::ostream& out) {
  const UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.valid()) return ErrnoStatus(errno, absl::StrCat("opening the recording ", path));
  RecordReader reader(file.get());
  const absl::StatusOr<ArbiterOptions> options = ReadHeader(reader, path, out);
  if (!options.ok()) return options.status();

  Arbiter arbiter(*options);
  uint64_t steps = 0;
  uint64_t effects = 0;
  std::optional<recording::v1::Step> begun;  // its effects come next
  const auto take = [&]() -> absl::StatusOr<recording::v1::Effects> {
    const absl::StatusOr<Event> event = FromProto(begun->event());
    if (!event.ok()) return Damaged(path, steps, std::string(event.status().message()));
    return EffectsOf(arbiter.Step(*event, FromProto(begun->at())));
  };
  Record record;
  ReadResult result;
  while ((result = reader.Next(record)) == ReadResult::kRecord) {
    const bool in_turn = begun.has_value() ? record.has_effects() : record.has_step();
    if (!in_turn) {
      return Damaged(path, steps, "a step and its effects do not follow each other");
    }
    if (record.has_step()) {
      begun = record.step();
      continue;
    }
    ++steps;
    const absl::StatusOr<recording::v1::Effects> now = take();
    if (!now.ok()) return now.status();
    if (now->SerializeAsString() != record.effects().SerializeAsString()) {
      out << "step " << steps << " was decided differently: " << Text(*begun) << "\n";
      TellDifference(record.effects(), *now, out);
      return false;
    }
    effects += static_cast<uint64_t>(now->effects_size());
    begun.reset();
  }
  if (reader.error() != 0) return ErrnoStatus(reader.error(), absl::StrCat("reading ", path));
  if (result == ReadResult::kDamaged) return Damaged(path, steps, "what follows is no record");
  if (result == ReadResult::kCutOff) out << "the last record is cut off\n";
  if (begun.has_value()) {
    // Told before, in case that this core dies on it too.
    out << "step " << steps + 1 << " has no effects, the daemon ended in it: " << Text(*begun) << std::endl;
    if (const auto now = take(); !now.ok()) return now.status();
  }
  out << steps << " steps, " << effects << " effects: the same decisions\n";
  return true;
}

}  // namespace residency
