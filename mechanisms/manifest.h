// SPDX-License-Identifier: Apache-2.0
//
// A manifest is the table of a model's tensors: where each one's bytes are on disk. Producers of it are
// the safetensors format in its several shapes on disk, and an explicit table. Reads headers only, never
// tensor bytes; blocking file I/O, so it is called on a worker, never on a loop. Any thread.
//
// What a manifest that was returned promises: every tensor's byte count equals what its dtype and shape
// say, lies inside its file as it was when read, and shares no byte with another tensor of the same
// file unless the two are in an explicit table; names are unique within a component, and no longer than
// kMaxEntryNameBytes of json_entry.h.
#ifndef RESIDENCY_MECHANISMS_MANIFEST_H_
#define RESIDENCY_MECHANISMS_MANIFEST_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "mechanisms/dtype.h"
#include "mechanisms/layout.h"

namespace residency {

// A file as it was when its header was read. A later reader compares, so that a file that was replaced
// or changed in between is noticed.
struct SourceFile {
  std::string path;  // as given or found, links not resolved
  uint64_t bytes = 0;
  uint64_t device = 0;  // st_dev
  uint64_t inode = 0;   // st_ino
  int64_t mtime_ns = 0;

  bool operator==(const SourceFile&) const = default;
};

struct ManifestTensor {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<uint64_t> shape;
  uint32_t file = 0;         // index into Manifest::files
  uint64_t file_offset = 0;  // absolute, any alignment
  uint64_t bytes = 0;
};

// Every status of the daemon names the components, and every client is sent the tensors' names: a message to it has at
// most 4 MiB.
inline constexpr size_t kMaxComponents = 256;
inline constexpr size_t kMaxComponentNameBytes = 256;

struct ManifestComponent {
  std::string name;
  std::vector<ManifestTensor> tensors;  // by file, then by offset
};

struct Manifest {
  std::vector<SourceFile> files;
  std::vector<ManifestComponent> components;
};

// One --component N=PATH[#GLOB].
struct ComponentSource {
  std::string name;
  std::string path;
  std::string glob;  // fnmatch on tensor names; empty: all
};

// Reads what `source` is:
//  - a safetensors file: one component, named "model";
//  - NAME.tensors.json, an explicit table: its components in order of first mention ("model" where a row
//    names none), its files relative to the table's folder;
//  - a directory with one *.safetensors file, or shards with *.safetensors.index.json (a file that the
//    index does not name is ignored): one component, "model";
//  - a pipeline directory with model_index.json: one component for each weight-bearing folder that the
//    index names, in the index's order, named as the folder. Folders without weights are skipped.
// Symbolic links are followed throughout (the Hugging Face cache is a tree of them).
// `components` adds to it, or, with an empty `source`, is all of it.
//
// A tensor that two components would both take is refused, unless explicit tables say so. A component may
// have no bytes, the model may not.
//
// Errors name the file, and the tensor where there is one:
//  NOT_FOUND/NO_SUCH_FILE the path, or a file that an index or table names (FILE_MISSING), is not there;
//  INVALID_ARGUMENT/NOT_A_CHECKPOINT no weights there, neither file nor directory, or another format: the
//  message says which;
//  INVALID_ARGUMENT/EMPTY_MODEL no tensor has a byte;
//  INVALID_ARGUMENT/BAD_HEADER, BAD_DTYPE, BAD_SHAPE, BAD_OFFSETS, SIZE_MISMATCH, TRUNCATED,
//  DUPLICATE_NAME, HEADER_TOO_SMALL, HEADER_TOO_LARGE, BAD_METADATA, BAD_INDEX, BAD_TABLE, BAD_COMPONENT,
//  NO_MATCH what is wrong inside;
//  FAILED_PRECONDITION/FILE_CHANGED, DATA_LOSS/FILE_TRUNCATED a file was replaced, or became shorter, while the model
//  was read;
//  RESOURCE_EXHAUSTED/HOST_MEMORY a header is too large to parse in what memory there is;
//  UNREADABLE, with the code that ErrnoStatus gives, the system would not let us read it.
absl::StatusOr<Manifest> ReadManifest(const std::string& source, const std::vector<ComponentSource>& components = {});

// The manifest's components as MakeLayout takes them, same order.
std::vector<LayoutComponent> ToLayoutComponents(const Manifest& manifest);

// stat of `path` as a SourceFile. NOT_FOUND/NO_SUCH_FILE.
absl::StatusOr<SourceFile> StatSourceFile(const std::string& path);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_MANIFEST_H_
