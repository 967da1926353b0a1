// SPDX-License-Identifier: Apache-2.0
//
// All that goes into a recording, with no field left at what it is by itself.
#include "daemon/recording_codec.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/recorded_fields.h"
#include "mechanisms/refusal.h"

namespace residency {
namespace {

constexpr uint64_t kCell = kMinCellBytes;

// ---- Values that no field has by itself, each unlike the one before. ----

class Values {
 public:
  void Fill(bool& value) { value = true; }
  void Fill(uint64_t& value) { value = uint64_t{0xfedcba9800000000} + ++number_; }
  void Fill(uint32_t& value) { value = 0xfedc0000 + ++number_; }
  void Fill(int64_t& value) { value = -static_cast<int64_t>(++number_); }
  void Fill(std::string& value) { value = absl::StrCat("text ", ++number_, "\n", std::string(1, '\0')); }
  // Finer than a nanosecond, and negative.
  void Fill(absl::Duration& value) { value = -absl::Hours(1) - absl::Nanoseconds(++number_) / 4; }
  void Fill(absl::Time& value) { value = absl::UnixEpoch() + absl::Hours(1000000) + absl::Nanoseconds(++number_) / 4; }
  void Fill(absl::Status& value) {
    value =
        Refuse(absl::StatusCode::kAborted,
               Refusal{.reason = "BROKEN",
                       .needed_bytes = ++number_,
                       .available_bytes = ++number_,
                       .file = "file",
                       .tensor = "tensor",
                       .holders = {{.pid = 1, .uid = 2, .client = "c", .lease_id = 3, .bytes = 4, .age_seconds = 0.1}}},
               absl::StrCat("message ", ++number_));
  }
  void Fill(Layout& value) {
    std::vector<LayoutComponent> components = {{.name = absl::StrCat("a", ++number_)}, {.name = "none"}, {.name = "b"}};
    components[0].tensors = {{.name = "w", .bytes = 5 * kCell + 3}};
    components[2].tensors = {{.name = "x", .bytes = 2 * kCell}, {.name = "y", .bytes = 2}};
    value = *MakeLayout(std::move(components), 2 * kCell, kCell);
  }
  void Fill(Plan& value) {
    using R = CellResidency;
    value = {.cells = {R::kResident, R::kResident, R::kAbsent, R::kWindowed, R::kResident}, .window_slots = ++number_};
  }
  template <typename Tag>
  void Fill(Id<Tag>& value) {
    Fill(value.value);
  }
  template <typename T>
  void Fill(std::optional<T>& value) {
    Fill(value.emplace());
  }
  template <typename T>
  void Fill(std::vector<T>& value) {
    for (int i = 0; i < 3; ++i) Fill(value.emplace_back());
  }
  void Fill(decltype(Reply::outcome)& value) {
    value = RegisterOutcome{};
    Fill(std::get<RegisterOutcome>(value));
  }
  template <typename T>
  requires std::is_enum_v<T>
  void Fill(T& value) { value = static_cast<T>(static_cast<int>(value) == 1 ? 2 : 1); }
  template <typename T>
  requires requires { Recorded<T>::kMessage; }
  void Fill(T& value) {
    std::apply([this](auto&... member) { (Fill(member), ...); }, Recorded<T>::Fields(value));
  }

 private:
  uint32_t number_ = 0;
};

// ---- Whether two of them are equal, to the last member. ----

template <typename T>
bool Same(const T& a, const T& b);

bool Same(const LayoutComponent& a, const LayoutComponent& b) {
  return a.name == b.name && a.device_offset == b.device_offset && a.span_bytes == b.span_bytes &&
         a.payload_bytes == b.payload_bytes && a.first_cell == b.first_cell && a.cell_count == b.cell_count;
}

bool Same(const LayoutCell& a, const LayoutCell& b) {
  return a.device_offset == b.device_offset && a.bytes == b.bytes && a.component == b.component;
}

template <typename T>
bool Same(const std::vector<T>& a, const std::vector<T>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const T& x, const T& y) { return Same(x, y); });
}

bool Same(const Layout& a, const Layout& b) {
  return a.cell_bytes == b.cell_bytes && a.granule_bytes == b.granule_bytes && a.span_bytes == b.span_bytes &&
         a.payload_bytes == b.payload_bytes && Same(a.components, b.components) && Same(a.cells, b.cells) &&
         a.digest == b.digest;
}

template <typename... Ts>
bool Same(const std::variant<Ts...>& a, const std::variant<Ts...>& b) {
  return a.index() == b.index() &&
         std::visit([&](const auto& value) { return Same(value, std::get<std::decay_t<decltype(value)>>(b)); }, a);
}

template <typename T>
bool Same(const T& a, const T& b) {
  if constexpr (requires { Recorded<T>::kMessage; }) {
    const auto x = Recorded<T>::Fields(a);
    const auto y = Recorded<T>::Fields(b);
    return [&]<size_t... I>(std::index_sequence<I...>) { return (Same(std::get<I>(x), std::get<I>(y)) && ...); }
    (std::make_index_sequence<std::tuple_size_v<decltype(x)>>());
  } else {
    return a == b;
  }
}

// Calls `each` with a value of every alternative, all of its fields filled.
template <typename Variant>
void ForEachAlternative(const std::function<void(const Variant&)>& each) {
  [&]<size_t... I>(std::index_sequence<I...>) {
    const auto fill = [&](auto value) {
      if constexpr (!std::is_same_v<decltype(value), std::monostate>) Values().Fill(value);
      each(Variant(value));
    };
    (fill(std::variant_alternative_t<I, Variant>{}), ...);
  }
  (std::make_index_sequence<std::variant_size_v<Variant>>());
}

std::string Encoded(const Effect& effect) {
  recording::v1::Effect message;
  ToProto(effect, message);
  return message.SerializeAsString();
}

// The fields of `value` that can go back to what a new one has without a change of what is recorded. `wrap` makes an
// effect of it.
template <typename T, typename Wrap>
void FindUnnoticed(const T& value, Wrap wrap, std::vector<std::string>& unnoticed) {
  if constexpr (!std::is_same_v<T, std::monostate>) {
    const std::string filled = Encoded(wrap(value));
    const T bare{};
    const auto without = [&](auto index) {
      T changed = value;
      std::get<index>(Recorded<T>::Fields(changed)) = std::get<index>(Recorded<T>::Fields(bare));
      if (Encoded(wrap(changed)) != filled) return;
      unnoticed.push_back(absl::StrCat(Recorded<T>::kMessage, ", of ", Recorded<T>::kFields, " number ", index()));
    };
    [&]<size_t... I>(std::index_sequence<I...>) { (without(std::integral_constant<size_t, I>()), ...); }
    (std::make_index_sequence<std::tuple_size_v<decltype(Recorded<T>::Fields(value))>>());
  }
}

// ---- Tests. ----

TEST_CASE("Every event comes out of a recording as it went in, to the last field") {
  ForEachAlternative<Event>([](const Event& event) {
    recording::v1::Event message;
    ToProto(event, message);
    INFO(message.ShortDebugString());
    recording::v1::Event parsed;
    REQUIRE(parsed.ParseFromString(message.SerializeAsString()));
    const absl::StatusOr<Event> restored = FromProto(parsed);
    REQUIRE(restored.ok());
    CHECK(Same(event, *restored));
  });
}

TEST_CASE("The options of the core come out of a recording as they went in") {
  ArbiterOptions options;
  SECTION("with every field set") { Values().Fill(options); }
  SECTION("with none set") {}
  recording::v1::ArbiterOptions message;
  ToProto(options, message);
  const absl::StatusOr<ArbiterOptions> restored = FromProto(message);
  REQUIRE(restored.ok());
  CHECK(Same(options, *restored));
}

TEST_CASE("Endless times are recorded as endless") {
  for (const absl::Time time : {absl::InfiniteFuture(), absl::InfinitePast(), absl::UnixEpoch() - absl::Seconds(1)}) {
    recording::v1::Time message;
    ToProto(time, message);
    CHECK(FromProto(message) == time);
  }
}

TEST_CASE("Every field of every effect and of every outcome makes a difference in a recording") {
  std::vector<std::string> unnoticed;
  std::set<std::string> seen;
  ForEachAlternative<Effect>([&](const Effect& effect) {
    seen.insert(Encoded(effect));
    std::visit(
        [&](const auto& value) {
          FindUnnoticed(
              value, [](const auto& v) { return Effect(v); }, unnoticed);
        },
        effect);
  });
  ForEachAlternative<decltype(Reply::outcome)>([&](const decltype(Reply::outcome)& outcome) {
    seen.insert(Encoded(Reply{.outcome = outcome}));
    std::visit(
        [&](const auto& value) {
          FindUnnoticed(
              value, [](const auto& v) { return Effect(Reply{.outcome = v}); }, unnoticed);
        },
        outcome);
  });
  CHECK(unnoticed == std::vector<std::string>());
  CHECK(seen.size() == std::variant_size_v<Effect> + std::variant_size_v<decltype(Reply::outcome)>);
}

}  // namespace
}  // namespace residency
