// SPDX-License-Identifier: Apache-2.0
//
// What a file that is no safetensors file really is, by its first bytes. People meet these under a
// model's name after a download that went wrong, and a message about a header's length does not help
// them. Any thread.
#ifndef RESIDENCY_MECHANISMS_FILE_KIND_H_
#define RESIDENCY_MECHANISMS_FILE_KIND_H_

#include <optional>
#include <string_view>

#include "mechanisms/regular_file.h"

namespace residency {

struct FileKind {
  std::string_view name;     // "a Git LFS pointer (...)" and the like, with what to do about it
  bool is_stand_in = false;  // what is found in the place of any file that was not downloaded
};

// Nothing where it is not known or cannot be read. A valid safetensors file may begin with the same bytes, so this is
// asked only about files that were found not to be valid.
std::optional<FileKind> FileKindOf(const RegularFile& file);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_FILE_KIND_H_
