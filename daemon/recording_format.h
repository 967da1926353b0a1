// SPDX-License-Identifier: Apache-2.0
//
// How a recording is told from other files. For recording.cc and replay.cc.
#ifndef RESIDENCY_DAEMON_RECORDING_FORMAT_H_
#define RESIDENCY_DAEMON_RECORDING_FORMAT_H_

#include <cstdint>

namespace residency {

inline constexpr char kRecordingMagic[] = "residencyd recording";
// Raised where what is written means something else than before; a new field or event needs no new version.
inline constexpr uint32_t kRecordingFormat = 1;

}  // namespace residency

#endif  // RESIDENCY_DAEMON_RECORDING_FORMAT_H_
