// SPDX-License-Identifier: Apache-2.0
//
// Any bytes as a checkpoint: what is accepted keeps what manifest.h and layout.h promise, what is refused is refused
// with a documented reason. The first byte says as what the others are read; see LLVMFuzzerTestOneInput.
#include <fcntl.h>
#include <simdjson.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <set>
#include <tuple>

#include "absl/status/status.h"
#include "mechanisms/layout.h"
#include "mechanisms/manifest.h"
#include "mechanisms/refusal.h"
#include "tests/fuzz/fuzz_input.h"

namespace residency {
namespace {

// Between the files that one input holds. No JSON has these bytes.
constexpr std::string_view kNextFile = "\xFF\xFE";
// Sparse files, so that layouts become large too.
constexpr uint64_t kMaxFileBytes = uint64_t{1} << 46;

// Those that ReadManifest names.
const std::set<std::string> kReasons = {
    "NO_SUCH_FILE", "FILE_MISSING", "NOT_A_CHECKPOINT", "EMPTY_MODEL",      "BAD_HEADER",    "BAD_DTYPE",
    "BAD_SHAPE",    "BAD_OFFSETS",  "SIZE_MISMATCH",    "TRUNCATED",        "BAD_INDEX",     "DUPLICATE_NAME",
    "BAD_TABLE",    "BAD_METADATA", "HEADER_TOO_SMALL", "HEADER_TOO_LARGE", "BAD_COMPONENT", "NO_MATCH",
    "FILE_CHANGED", "HOST_MEMORY",  "UNREADABLE"};

// Widths in bits as the safetensors format gives them.
const std::map<std::string_view, uint32_t> kBits = {
    {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
    {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
    {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64}};

// A folder, in memory where tests/fuzz/run says so, that goes with the process.
class Folder {
 public:
  Folder() {
    const char* parent = getenv("TEST_TMPDIR");
    path_ = std::string(parent == nullptr ? "/dev/shm" : parent) + "/manifest_fuzz.XXXXXX";
    Check(mkdtemp(path_.data()) != nullptr, "mkdtemp");
    for (const char* folder :
         {"file", "table", "index", "pipeline/transformer", "pipeline/text_encoder", "pipeline/scheduler"}) {
      std::filesystem::create_directories(Path(folder));
    }
  }
  ~Folder() { std::filesystem::remove_all(path_); }

  std::string Path(const std::string& name) const { return path_ + "/" + name; }

  // `name` with `contents`, and a hole behind it up to `bytes`.
  std::string Write(const std::string& name, std::string_view contents, uint64_t bytes = 0) const {
    const int fd = open(Path(name).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    Check(fd >= 0 && write(fd, contents.data(), contents.size()) == static_cast<ssize_t>(contents.size()), "write");
    Check(bytes <= contents.size() || ftruncate(fd, static_cast<off_t>(bytes)) == 0, "ftruncate");
    close(fd);
    return Path(name);
  }

 private:
  std::string path_;
};

// The byte count that shape and dtype come to.
bool IsBytesOf(const ManifestTensor& tensor) {
  unsigned __int128 bits = kBits.at(DTypeName(tensor.dtype));
  for (const uint64_t dimension : tensor.shape) {
    if (dimension != 0 && bits > (~static_cast<unsigned __int128>(0)) / dimension) return false;
    bits *= dimension;
  }
  return bits % 8 == 0 && bits / 8 == tensor.bytes;
}

void CheckManifest(const Manifest& manifest, bool may_alias) {
  for (const SourceFile& file : manifest.files) {
    struct stat found;
    Check(stat(file.path.c_str(), &found) == 0, "a manifest's file is there");
    Check(S_ISREG(found.st_mode), "a manifest's file is regular");
    Check(static_cast<uint64_t>(found.st_size) == file.bytes && found.st_ino == file.inode, "a file is as it was read");
  }
  std::set<std::string> component_names;
  std::set<std::tuple<uint32_t, uint64_t, uint64_t>> ranges;
  bool has_bytes = false;
  for (const ManifestComponent& component : manifest.components) {
    Check(!component.name.empty() && component_names.insert(component.name).second,
          "components have names of their own");
    std::set<std::string_view> names;
    for (const ManifestTensor& tensor : component.tensors) {
      Check(names.insert(tensor.name).second, "names are unique within a component");
      Check(tensor.file < manifest.files.size(), "a tensor's file is one of the manifest's");
      const uint64_t file_bytes = manifest.files[tensor.file].bytes;
      Check(tensor.file_offset <= file_bytes && tensor.bytes <= file_bytes - tensor.file_offset,
            "a tensor lies inside its file");
      Check(IsBytesOf(tensor), "a tensor has the bytes that its shape and dtype say");
      if (tensor.bytes == 0) continue;
      has_bytes = true;
      ranges.emplace(tensor.file, tensor.file_offset, tensor.file_offset + tensor.bytes);
    }
  }
  Check(has_bytes, "a model has a byte");
  if (may_alias) return;
  size_t count = 0;
  for (const ManifestComponent& component : manifest.components) {
    for (const ManifestTensor& tensor : component.tensors) count += tensor.bytes > 0;
  }
  Check(count == ranges.size(), "no range is taken twice");
  for (auto at = ranges.begin(), next = at; ++next != ranges.end(); at = next) {
    Check(std::get<0>(*at) != std::get<0>(*next) || std::get<2>(*at) <= std::get<1>(*next), "no tensors share a byte");
  }
}

// The numbered invariants of layout.h.
void CheckLayout(const Layout& layout, const Manifest& manifest) {
  Check(layout.components.size() == manifest.components.size(), "a layout has the manifest's components");
  uint64_t span = 0;
  uint64_t payload = 0;
  size_t cell = 0;
  for (size_t i = 0; i < layout.components.size(); ++i) {
    const LayoutComponent& component = layout.components[i];
    Check(component.name == manifest.components[i].name, "components keep their order");
    Check(component.device_offset == span && span % layout.granule_bytes == 0, "2: a component starts on a granule");
    Check(component.tensors.size() == manifest.components[i].tensors.size(), "a component has its tensors");
    uint64_t end = span;
    uint64_t component_payload = 0;
    for (size_t j = 0; j < component.tensors.size(); ++j) {
      const LayoutTensor& tensor = component.tensors[j];
      const ManifestTensor& from = manifest.components[i].tensors[j];
      Check(tensor.name == from.name && tensor.bytes == from.bytes && tensor.shape == from.shape, "1: order is kept");
      Check(tensor.device_offset % kTensorAlignment == 0, "1: tensors are aligned");
      Check(tensor.device_offset >= end, "1: tensors do not overlap");
      end = tensor.device_offset + tensor.bytes;
      component_payload += tensor.bytes;
    }
    Check(component.payload_bytes == component_payload, "a component's payload is its tensors'");
    Check(component.first_cell == cell, "a component's cells follow those before");
    uint64_t tiled = span;
    for (uint32_t j = 0; j < component.cell_count; ++j, ++cell) {
      const LayoutCell& of = layout.cells.at(cell);
      Check(of.component == i && of.device_offset == tiled && of.bytes > 0, "3: cells tile the span");
      const bool is_last = j + 1 == component.cell_count;
      Check(is_last ? of.bytes <= layout.cell_bytes && of.bytes % layout.granule_bytes == 0
                    : of.bytes == layout.cell_bytes,
            "3: cells have the size of cells");
      tiled += of.bytes;
    }
    Check(tiled == span + component.span_bytes, "3: cells tile the whole span");
    Check(end <= tiled && tiled - end < layout.granule_bytes, "3: the last cell is cut to the granule");
    span = tiled;
    payload += component_payload;
  }
  Check(cell == layout.cells.size() && cell <= kMaxCells, "every cell is a component's");
  Check(span == layout.span_bytes, "4: the span is the sum of the cells");
  Check(payload == layout.payload_bytes, "the payload is the sum of the tensors");
}

void CheckRefusal(const absl::Status& status, const Folder& folder) {
  const std::optional<Refusal> refusal = GetRefusal(status);
  Check(refusal.has_value() && kReasons.count(refusal->reason) != 0, status.ToString());
  const std::string message(status.message());
  Check(!message.empty() && simdjson::validate_utf8(message), "a message is text");
  // They become strings of a proto, which are UTF-8 or do not travel.
  Check(simdjson::validate_utf8(refusal->file) && simdjson::validate_utf8(refusal->tensor), "details are text");
  const bool is_missing = refusal->reason == "NO_SUCH_FILE" || refusal->reason == "FILE_MISSING";
  Check(absl::IsNotFound(status) == is_missing, status.ToString());
  if (!absl::IsInternal(status)) return;
  // A table may name any file of the machine, of which the system may say anything.
  Check(refusal->reason == "UNREADABLE" && refusal->file.find(folder.Path("")) != 0, status.ToString());
}

void ReadAndCheck(const Folder& folder, const std::string& source, uint8_t choice, bool may_alias) {
  std::vector<ComponentSource> components;
  if ((choice & 0x40) != 0) components.push_back({"extra", source, "w*"});
  const absl::StatusOr<Manifest> manifest =
      (choice & 0x80) != 0 ? ReadManifest("", {{"only", source, "*.w?"}}) : ReadManifest(source, components);
  if (!manifest.ok()) return CheckRefusal(manifest.status(), folder);
  CheckManifest(*manifest, may_alias);
  const uint64_t cell_bytes = kMinCellBytes << ((choice >> 3) & 7);
  const absl::StatusOr<Layout> layout = MakeLayout(ToLayoutComponents(*manifest), cell_bytes, kDefaultGranuleBytes);
  if (layout.ok()) return CheckLayout(*layout, *manifest);
  Check(ReasonOf(layout.status()) == "TOO_LARGE", layout.status().ToString());
}

}  // namespace
}  // namespace residency

// The first byte: bits 0-2 what is read, 3-5 the cells' size, 6 and 7 how it is asked for.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace residency;
  static const Folder folder;
  FuzzInput input(data, size);
  const uint8_t choice = input.Byte();
  switch (choice & 7) {
    case 0:  // a safetensors file as it is
      ReadAndCheck(folder, folder.Write("file/model.safetensors", input.TextUntil(kNextFile)), choice, false);
      break;
    case 1: {  // the same, as long as it says it is: 8 bytes, then the file
      const uint64_t bytes = input.Integer(8) % kMaxFileBytes;
      ReadAndCheck(folder, folder.Write("file/long.safetensors", input.TextUntil(kNextFile), bytes), choice, false);
      break;
    }
    case 2: {  // an explicit table over two files
      folder.Write("table/a.bin", "", 4096);
      folder.Write("table/b.bin", "", uint64_t{1} << 34);
      ReadAndCheck(folder, folder.Write("table/model.tensors.json", input.TextUntil(kNextFile)), choice, true);
      break;
    }
    case 3:  // an index, and two shards
      folder.Write("index/model.safetensors.index.json", input.TextUntil(kNextFile));
      folder.Write("index/a.safetensors", input.TextUntil(kNextFile));
      folder.Write("index/b.safetensors", input.TextUntil(kNextFile));
      ReadAndCheck(folder, folder.Path("index"), choice, false);
      break;
    default:  // a pipeline: its index, a folder with one file, a folder with an index and one shard
      folder.Write("pipeline/model_index.json", input.TextUntil(kNextFile));
      folder.Write("pipeline/transformer/model.safetensors", input.TextUntil(kNextFile));
      folder.Write("pipeline/text_encoder/model.safetensors.index.json", input.TextUntil(kNextFile));
      folder.Write("pipeline/text_encoder/a.safetensors", input.TextUntil(kNextFile));
      ReadAndCheck(folder, folder.Path("pipeline"), choice, false);
  }
  return 0;
}
