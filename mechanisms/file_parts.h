// SPDX-License-Identifier: Apache-2.0
//
// Where cells are filled from mappings of the weight files themselves: what of the files is page-locked, and which
// copies make up each cell. A file has its tensors at any offset and close together, a cell has them at multiples of
// 256 bytes with zeros between, so a cell is several copies. Pure; any thread.
#ifndef RESIDENCY_MECHANISMS_FILE_PARTS_H_
#define RESIDENCY_MECHANISMS_FILE_PARTS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "mechanisms/layout.h"
#include "mechanisms/manifest.h"
#include "mechanisms/source.h"
#include "mechanisms/units.h"

namespace residency {

// Most bytes of a file that are page-locked by one call, between which a caller who gives up is heard. What is not in
// memory comes from the disk within the call: 37 ms at 1.7 GiB/s, 0.6 s at 100 MiB/s. On an H200's host a call costs
// some 0.1 ms beside the 1.6 ms for so many bytes that are there (38 GiB/s); pieces of 8 MiB would take half as long
// again.
inline constexpr uint64_t kFilePieceBytes = 64 * kMiB;

// Pages of a file that one call page-locks.
struct FilePiece {
  uint32_t file = 0;    // index into Manifest::files
  uint64_t offset = 0;  // of a page
  uint64_t bytes = 0;   // whole pages; the last one may reach past the file's end

  bool operator==(const FilePiece&) const = default;
};

// Pieces of at most `piece_bytes`, whole pages, which hold all tensors: by file, then by offset, no page twice. What
// lies between two tensors is part of a piece where it is small.
std::vector<FilePiece> FilePieces(const Manifest& manifest, uint64_t piece_bytes);

uint64_t BytesOf(std::span<const FilePiece> pieces);

// The parts of each cell of component `component_index`, whose manifest the layout was made of. `files` are where each
// file's first byte is mapped. Tensors that follow each other in the file as on the device are one part.
std::vector<std::vector<CellPart>> FileParts(const Layout& layout, uint32_t component_index, const Manifest& manifest,
                                             std::span<const FilePiece> pieces,
                                             std::span<const std::byte* const> files);

}  // namespace residency

#endif  // RESIDENCY_MECHANISMS_FILE_PARTS_H_
