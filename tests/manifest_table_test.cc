// SPDX-License-Identifier: Apache-2.0
//
// The explicit table, NAME.tensors.json.
#include <catch2/catch.hpp>

#include "mechanisms/manifest.h"
#include "tests/checkpoint_fixture.h"

namespace residency {
namespace {

using Names = std::vector<std::string>;

std::string Table(const std::string& rows) { return "{\"tensors\":[" + rows + "]}"; }

std::string Row(const std::string& name, const std::string& file, const std::string& offset, const std::string& bytes,
                const std::string& more = "") {
  return R"({"name":")" + name + R"(","dtype":"U8","shape":[)" + bytes + R"(],"file":")" + file + R"(","offset":)" +
         offset + R"(,"bytes":)" + bytes + more + "}";
}

TEST_CASE("A table names tensors in files of any format, relative to its folder") {
  CheckpointDir directory;
  const std::string blob = directory.Write("m/raw/blob.bin", std::string(100, 'x'));
  directory.Write("m/model.gguf", "GGUF" + std::string(60, 'y'));
  const std::string path = directory.Write(
      "m/toy.tensors.json",
      Table(
          Row("late", "raw/blob.bin", "60", "40") + "," + Row("early", "raw/blob.bin", "7", "3", R"(,"sha256":"..")") +
          R"(,{"bytes":24,"component":"vae","offset":4,"file":"model.gguf","shape":[2,3],"dtype":"F32","name":"g"})"));
  const Manifest manifest = ReadGood(path);
  CHECK(NamesOf(manifest) == Names{"model/early", "model/late", "vae/g"});
  REQUIRE(manifest.files.size() == 2);
  CHECK(manifest.files[0] == Describe(blob));
  const ManifestTensor& g = manifest.components[1].tensors[0];
  CHECK(g.dtype == DType::kF32);
  CHECK(g.shape == std::vector<uint64_t>{2, 3});
  CHECK(g.file == 1);
  CHECK(g.file_offset == 4);
  CHECK(g.bytes == 24);
}

TEST_CASE("Components stand in order of first mention and gather their rows") {
  CheckpointDir directory;
  directory.Write("b", std::string(10, 'x'));
  const std::string path = directory.Write(
      "t.tensors.json",
      Table(Row("1", "b", "0", "1", R"(,"component":"z")") + "," + Row("2", "b", "1", "1") + "," +
            Row("1", "b", "2", "1", R"(,"component":"a")") + "," + Row("3", "b", "3", "1", R"(,"component":"z")")));
  CHECK(NamesOf(ReadGood(path)) == Names{"z/1", "z/3", "model/2", "a/1"});
}

TEST_CASE("Rows of a table may share bytes") {
  CheckpointDir directory;
  directory.Write("b", std::string(10, 'x'));
  const std::string path =
      directory.Write("t.tensors.json",
                      Table(Row("tied", "b", "0", "8") + "," + Row("same", "b", "0", "8") + "," +
                            Row("part", "b", "4", "6") + "," + Row("tied", "b", "0", "8", R"(,"component":"other")")));
  CHECK(NamesOf(ReadGood(path)) == Names{"model/tied", "model/same", "model/part", "other/tied"});
  CHECK(ReadGood("", {{"x", path, "part"}, {"y", path, "same"}}).components.size() == 2);
}

TEST_CASE("What a table gets wrong is refused with its tensor") {
  CheckpointDir directory;
  directory.Write("b", std::string(10, 'x'));
  std::filesystem::create_directory(directory.Path("folder"));
  const struct {
    std::string table;
    const char* reason;
    const char* tensor;
  } kCases[] = {
      {"", "BAD_TABLE", ""},
      {"[]", "BAD_TABLE", ""},
      {"{}", "BAD_TABLE", ""},
      {R"({"tensors":{}})", "BAD_TABLE", ""},
      {R"({"tensors":[],"tensors":[]})", "BAD_TABLE", ""},
      {Table("1"), "BAD_TABLE", "#0"},
      {Table(Row("a", "b", "0", "1") + ",{}"), "BAD_TABLE", "#1"},
      {Table(R"({"name":7,"dtype":"U8","shape":[1],"file":"b","offset":0,"bytes":1})"), "BAD_TABLE", "#0"},
      {Table(Row("a", "b", "0", "1", R"(,"name":"c")")), "BAD_TABLE", "#0"},
      {Table(Row("a", "b", "-1", "1")), "BAD_TABLE", "a"},
      {Table(Row("a", "b", "0.0", "1")), "BAD_TABLE", "a"},
      {Table(Row("a", "b", "\"0\"", "1")), "BAD_TABLE", "a"},
      {Table(Row("a", "", "0", "1")), "BAD_TABLE", "a"},
      {Table(Row("a", "b", "0", "1", R"(,"component":"")")), "BAD_TABLE", "a"},
      {Table(Row("a", "b", "0", "1", R"(,"component":null)")), "BAD_TABLE", "a"},
      {Table(R"({"name":"a","dtype":"u8","shape":[1],"file":"b","offset":0,"bytes":1})"), "BAD_DTYPE", "a"},
      {Table(R"({"name":"a","dtype":"U8","shape":[-1],"file":"b","offset":0,"bytes":1})"), "BAD_SHAPE", "a"},
      {Table(R"({"name":"a","dtype":"F32","shape":[1],"file":"b","offset":0,"bytes":1})"), "SIZE_MISMATCH", "a"},
      {Table(Row(std::string(4097, 'a'), "b", "0", "1")), "BAD_TABLE", "#0"},
      {Table(Row("a", "b", "0", "1", R"(,"component":")" + std::string(257, 'c') + "\"")), "BAD_COMPONENT", ""},
      {Table(Row("a", "b", "0", "11")), "TRUNCATED", "a"},
      {Table(Row("a", "b", "10", "1")), "TRUNCATED", "a"},
      {Table(Row("a", "b", "18446744073709551615", "2")), "TRUNCATED", "a"},
      {Table(Row("a", "b", "0", "1") + "," + Row("a", "b", "1", "1")), "DUPLICATE_NAME", "a"},
      {Table(Row("a", "folder", "0", "1")), "NOT_A_CHECKPOINT", ""},
      {Table(Row("a", "nowhere", "0", "1")), "FILE_MISSING", ""},
      {Table(""), "EMPTY_MODEL", ""},
      {Table(Row("a", "b", "10", "0")), "EMPTY_MODEL", ""},
  };
  for (const auto& c : kCases) {
    INFO(c.table);
    const Refusal refusal = ReadBad(directory.Write("t.tensors.json", c.table));
    CHECK(refusal.reason == c.reason);
    CHECK(refusal.tensor == c.tensor);
  }
}

TEST_CASE("A table, and a file that it names, are called what stands in their place") {
  const std::string pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4877660776\n";
  CheckpointDir directory;
  CHECK(ReadBad(directory.Write("p.tensors.json", pointer)).reason == "BAD_TABLE");
  CHECK(MessageOf(directory.Path("p.tensors.json")).find("Git LFS pointer") != std::string::npos);
  CHECK(MessageOf(directory.Write("e.tensors.json", "")).find("empty") != std::string::npos);
  directory.Write("blob", pointer);
  const std::string table = directory.Write("t.tensors.json", Table(Row("a", "blob", "0", "4096")));
  CHECK(ReadBad(table).reason == "TRUNCATED");
  CHECK(MessageOf(table).find("Git LFS pointer") != std::string::npos);
  // A short blob may begin like anything.
  directory.Write("blob", "{\"a\":1}");
  CHECK(MessageOf(table).find(" and is ") == std::string::npos);
}

TEST_CASE("A model has at most 256 components") {
  CheckpointDir directory;
  directory.Write("b", "x");
  std::string rows;
  for (int i = 0; i < 256; ++i) {
    rows += (i == 0 ? "" : ",") + Row("a", "b", "0", "1", R"(,"component":"c)" + std::to_string(i) + "\"");
  }
  CHECK(ReadGood(directory.Write("t.tensors.json", Table(rows))).components.size() == 256);
  rows += "," + Row("a", "b", "0", "1", R"(,"component":"more")");
  CHECK(ReadBad(directory.Write("t.tensors.json", Table(rows))).reason == "BAD_COMPONENT");
  CHECK(MessageOf(directory.Path("t.tensors.json")).find("256") != std::string::npos);
}

TEST_CASE("A table that is not there or is a directory is refused") {
  CheckpointDir directory;
  CHECK(ReadBad(directory.Path("t.tensors.json")).reason == "NO_SUCH_FILE");
  std::filesystem::create_directory(directory.Path("d.tensors.json"));
  CHECK(ReadBad(directory.Path("d.tensors.json")).reason == "NOT_A_CHECKPOINT");
}

}  // namespace
}  // namespace residency
