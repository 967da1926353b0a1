// SPDX-License-Identifier: Apache-2.0
#include "daemon/recorded_values.h"

#include <algorithm>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace residency {

// ---- Times. ----

void EncodeValue(absl::Duration value, recording::v1::Duration& message) {
  if (value == absl::InfiniteDuration() || value == -absl::InfiniteDuration()) {
    return message.set_infinite(value > absl::ZeroDuration() ? 1 : -1);
  }
  absl::Duration rest;
  message.set_seconds(absl::IDivDuration(value, absl::Seconds(1), &rest));
  message.set_quarter_nanos(absl::IDivDuration(rest, absl::Nanoseconds(1) / 4, &rest));
}

absl::Status DecodeValue(const recording::v1::Duration& message, absl::Duration& value) {
  value = message.infinite() != 0
              ? absl::InfiniteDuration() * message.infinite()
              : absl::Seconds(message.seconds()) + (absl::Nanoseconds(1) / 4) * message.quarter_nanos();
  return absl::OkStatus();
}

void EncodeValue(absl::Time value, recording::v1::Time& message) {
  EncodeValue(value - absl::UnixEpoch(), *message.mutable_since_epoch());
}

absl::Status DecodeValue(const recording::v1::Time& message, absl::Time& value) {
  absl::Duration since_epoch;
  absl::Status status = DecodeValue(message.since_epoch(), since_epoch);
  value = absl::UnixEpoch() + since_epoch;
  return status;
}

// ---- Statuses, with whatever they carry. ----

void EncodeValue(const absl::Status& value, recording::v1::Status& message) {
  message.set_code(static_cast<int32_t>(value.code()));
  message.set_message(std::string(value.message()));
  value.ForEachPayload([&](absl::string_view type_url, const absl::Cord& content) {
    recording::v1::Status::Payload& payload = *message.add_payloads();
    payload.set_type_url(std::string(type_url));
    payload.set_content(std::string(content));
  });
}

absl::Status DecodeValue(const recording::v1::Status& message, absl::Status& value) {
  value = absl::Status(static_cast<absl::StatusCode>(message.code()), message.message());
  for (const recording::v1::Status::Payload& payload : message.payloads()) {
    value.SetPayload(payload.type_url(), absl::Cord(payload.content()));
  }
  return absl::OkStatus();
}

// ---- Layouts. ----

void EncodeValue(const Layout& value, recording::v1::Layout& message) {
  // The cells follow from the rest.
  const auto& [cell_bytes, granule_bytes, span_bytes, payload_bytes, components, cells, digest] = value;
  message.set_cell_bytes(cell_bytes);
  message.set_granule_bytes(granule_bytes);
  message.set_span_bytes(span_bytes);
  message.set_payload_bytes(payload_bytes);
  message.set_digest(digest);
  for (const LayoutComponent& component : components) {
    const auto& [name, tensors, device_offset, component_span_bytes, component_payload_bytes, first_cell, cell_count] =
        component;
    recording::v1::LayoutComponent& out = *message.add_components();
    out.set_name(name);
    out.set_device_offset(device_offset);
    out.set_span_bytes(component_span_bytes);
    out.set_payload_bytes(component_payload_bytes);
    out.set_first_cell(first_cell);
    out.set_cell_count(cell_count);
  }
}

absl::Status DecodeValue(const recording::v1::Layout& message, Layout& value) {
  value = Layout{.cell_bytes = message.cell_bytes(),
                 .granule_bytes = message.granule_bytes(),
                 .span_bytes = message.span_bytes(),
                 .payload_bytes = message.payload_bytes(),
                 .digest = message.digest()};
  for (const recording::v1::LayoutComponent& in : message.components()) {
    const bool tiled = in.first_cell() == value.cells.size() && in.cell_count() <= kMaxCells - value.cells.size() &&
                       (in.cell_count() == 0 ? in.span_bytes() == 0
                                             : value.cell_bytes > 0 && in.span_bytes() > 0 &&
                                                   (in.span_bytes() - 1) / value.cell_bytes == in.cell_count() - 1);
    if (!tiled) {
      return absl::InvalidArgumentError(absl::StrCat("component ", in.name(), ": no layout has a span of ",
                                                     in.span_bytes(), " bytes in ", in.cell_count(), " cells of ",
                                                     value.cell_bytes, " bytes, the first of them ", in.first_cell()));
    }
    const uint32_t index = static_cast<uint32_t>(value.components.size());
    value.components.push_back({.name = in.name(),
                                .device_offset = in.device_offset(),
                                .span_bytes = in.span_bytes(),
                                .payload_bytes = in.payload_bytes(),
                                .first_cell = in.first_cell(),
                                .cell_count = in.cell_count()});
    for (uint64_t offset = 0; offset < in.span_bytes(); offset += value.cell_bytes) {
      value.cells.push_back({in.device_offset() + offset, std::min(value.cell_bytes, in.span_bytes() - offset), index});
    }
  }
  return absl::OkStatus();
}

// ---- Plans. ----

void EncodeValue(const Plan& value, recording::v1::Plan& message) {
  const auto& [cells, window_slots] = value;
  message.set_window_slots(window_slots);
  for (auto begin = cells.begin(); begin != cells.end();) {
    const auto end = std::find_if(begin, cells.end(), [&](CellResidency residency) { return residency != *begin; });
    recording::v1::Plan::Run& run = *message.add_runs();
    run.set_count(static_cast<uint32_t>(end - begin));
    run.set_residency(static_cast<uint32_t>(*begin));
    begin = end;
  }
}

}  // namespace residency
