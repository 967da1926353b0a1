// SPDX-License-Identifier: Apache-2.0
//
// One safetensors file: what the format allows and forbids.
#include "mechanisms/manifest.h"

#include <sys/fsuid.h>
#include <sys/stat.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <random>
#include <thread>

#include "mechanisms/regular_file.h"
#include "tests/checkpoint_fixture.h"

namespace residency {
namespace {

struct Wrong {
  const char* what;
  std::string image;
  const char* reason;
  const char* tensor;
};

void CheckRefused(const std::vector<Wrong>& cases) {
  CheckpointDir directory;
  for (const Wrong& wrong : cases) {
    INFO(wrong.what);
    const std::string path = directory.Write("x.safetensors", wrong.image);
    const Refusal refusal = ReadBad(path);
    CHECK(refusal.reason == wrong.reason);
    CHECK(refusal.file == path);
    CHECK(refusal.tensor == wrong.tensor);
  }
}

TEST_CASE("A file's tensors are found where they lie, with the file as it was") {
  CheckpointDir directory;
  const std::string header = "{" + Entry("a", "F32", "[2,3]", 0, 24) + "," + Entry("b", "BF16", "[5,2]", 24, 44) + "}";
  const std::string path = directory.Write("x.safetensors", Safetensors(header, 44));
  const Manifest manifest = ReadGood(path);
  REQUIRE(manifest.components.size() == 1);
  CHECK(manifest.components[0].name == "model");
  REQUIRE(manifest.components[0].tensors.size() == 2);
  const ManifestTensor& b = manifest.components[0].tensors[1];
  CHECK(b.name == "b");
  CHECK(b.dtype == DType::kBF16);
  CHECK(b.shape == std::vector<uint64_t>{5, 2});
  CHECK(b.file == 0);
  CHECK(b.file_offset == 8 + header.size() + 24);
  CHECK(b.bytes == 20);
  REQUIRE(manifest.files.size() == 1);
  CHECK(manifest.files[0] == Describe(path));
  CHECK(*StatSourceFile(path) == Describe(path));
}

TEST_CASE("Tensors come in the order of the file, not of the header") {
  CheckpointDir directory;
  const std::string header = "{" + Entry("z", "F32", "[2]", 12, 20) + "," + Entry("a", "F32", "[3]", 0, 12) + "}";
  CHECK(NamesOf(ReadGood(directory.Write("x.safetensors", Safetensors(header, 20)))) ==
        std::vector<std::string>{"model/a", "model/z"});
}

TEST_CASE("Scalars have one element and empty tensors share their offset with the next") {
  CheckpointDir directory;
  const std::string header = "{" + Entry("w", "F32", "[2]", 4, 12) + "," + Entry("tail", "F32", "[3,0,5]", 12, 12) +
                             "," + Entry("empty", "F8_E4M3", "[0]", 4, 4) + "," + Entry("scale", "F32", "[]", 0, 4) +
                             "}";
  const Manifest manifest = ReadGood(directory.Write("x.safetensors", Safetensors(header, 12)));
  CHECK(NamesOf(manifest) == std::vector<std::string>{"model/scale", "model/empty", "model/w", "model/tail"});
  CHECK(manifest.components[0].tensors[0].shape.empty());
  CHECK(manifest.components[0].tensors[3].bytes == 0);
}

TEST_CASE("All types of the format are taken, by their width in bits") {
  CheckpointDir directory;
  uint64_t end = 0;
  std::string header = "{";
  for (int i = 0; i < kDTypeCount; ++i) {
    const DType dtype = static_cast<DType>(i);
    // Eight elements of so many bits are as many bytes.
    header += (i == 0 ? "" : ",") +
              Entry(std::to_string(i), std::string(DTypeName(dtype)), "[8]", end, end + DTypeBits(dtype));
    end += DTypeBits(dtype);
  }
  const Manifest manifest = ReadGood(directory.Write("x.safetensors", Safetensors(header + "}", end)));
  CHECK(manifest.components[0].tensors.size() == 22);
}

TEST_CASE("What the format leaves open is accepted") {
  const std::string w = Entry("w", "F32", "[1]", 0, 4);
  const std::string noted = R"("w":{"note":{"by":["x",1.5]},"dtype":"F32","shape":[1],"data_offsets":[0,4],"z":null})";
  const struct {
    const char* what;
    std::string header;
  } kCases[] = {
      {"metadata", R"({"__metadata__":{"format":"pt","note":"x"},)" + w + "}"},
      {"empty metadata", R"({"__metadata__":{},)" + w + "}"},
      {"null metadata means none", R"({"__metadata__":null,)" + w + "}"},
      {"metadata after the tensors", "{" + w + R"(,"__metadata__":{"a":"b"}})"},
      {"unknown keys in an entry", "{" + noted + "}"},
      {"space after the header", "{" + w + "}       "},
      {"space within the header", "{ \n\t" + w + " }"},
      {"an odd header length", "{" + w + "} "},
      {"an escaped name", "{" + Entry("w\\u00e9\\n\\\"", "F32", "[1]", 0, 4) + "}"},
      {"an empty name", "{" + Entry("", "F32", "[1]", 0, 4) + "}"},
  };
  CheckpointDir directory;
  for (const auto& c : kCases) {
    INFO(c.what);
    const Manifest manifest = ReadGood(directory.Write("x.safetensors", Safetensors(c.header, 4)));
    CHECK(manifest.components[0].tensors.size() == 1);
  }
}

TEST_CASE("A header's length is held against the format's limit and the file") {
  CheckRefused({
      {"empty", "", "HEADER_TOO_SMALL", ""},
      {"seven bytes", std::string("\x10\0\0\0\0\0\0", 7), "HEADER_TOO_SMALL", ""},
      {"past the end", LengthPrefix(4096) + "{\"w\":", "TRUNCATED", ""},
      {"past the end by one", LengthPrefix(3) + "{}", "TRUNCATED", ""},
      {"wraps when 8 is added", LengthPrefix(~uint64_t{0}) + "{}", "HEADER_TOO_LARGE", ""},
      {"wraps to the file's size", LengthPrefix(~uint64_t{0} - 7) + "{}", "HEADER_TOO_LARGE", ""},
      {"one over the limit", LengthPrefix(100'000'001) + "{}", "HEADER_TOO_LARGE", ""},
      {"the limit itself, but no such header", LengthPrefix(100'000'000) + "{}", "TRUNCATED", ""},
      {"no header", LengthPrefix(0), "NOT_A_CHECKPOINT", ""},
  });
}

TEST_CASE("A header that is no JSON object is refused") {
  const std::string w = Entry("w", "U8", "[1]", 0, 1);
  CheckRefused({
      {"broken", Safetensors(R"({"w":{"dtype":"F32",})", 0), "BAD_HEADER", ""},
      {"an array", Safetensors("[]", 0), "BAD_HEADER", ""},
      {"space before", Safetensors(" {" + w + "}", 1), "BAD_HEADER", ""},
      {"not UTF-8", Safetensors("{\"w\xff\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1), "BAD_HEADER",
       ""},
      {"half a surrogate pair", Safetensors("{" + Entry("\\ud800", "U8", "[1]", 0, 1) + "}", 1), "BAD_HEADER", ""},
      {"a second document", Safetensors(R"({},"__metadata__":{"k":"v"}})", 0), "BAD_HEADER", ""},
      {"something after it", Safetensors("{" + w + "}x", 1), "BAD_HEADER", ""},
      {"a NUL after it", Safetensors(std::string("{}\0", 3), 0), "BAD_HEADER", ""},
      {"a comma at the end", Safetensors("{" + w + ",}", 1), "BAD_HEADER", ""},
      {"very deep", Safetensors("{\"w\":" + std::string(100'000, '['), 0), "BAD_HEADER", ""},
  });
}

TEST_CASE("Metadata other than strings is refused") {
  const std::string w = "," + Entry("w", "F32", "[1]", 0, 4) + "}";
  CheckRefused({
      {"a number", Safetensors(R"({"__metadata__":{"step":0})" + w, 4), "BAD_METADATA", ""},
      {"a null", Safetensors(R"({"__metadata__":{"step":null})" + w, 4), "BAD_METADATA", ""},
      {"a text", Safetensors(R"({"__metadata__":"x")" + w, 4), "BAD_METADATA", ""},
      {"a tensor", Safetensors("{" + Entry("__metadata__", "F32", "[1]", 0, 4) + "}", 4), "BAD_METADATA", ""},
  });
}

TEST_CASE("A name that is there twice is refused, as are keys") {
  const std::string w = Entry("w", "F32", "[1]", 0, 4);
  CheckRefused({
      {"a tensor", Safetensors("{" + w + "," + Entry("w", "F32", "[1]", 4, 8) + "}", 8), "DUPLICATE_NAME", "w"},
      {"the same tensor", Safetensors("{" + w + "," + w + "}", 4), "DUPLICATE_NAME", "w"},
      {"once escaped", Safetensors("{" + w + "," + Entry("\\u0077", "F32", "[1]", 4, 8) + "}", 8), "DUPLICATE_NAME",
       "w"},
      {"metadata", Safetensors(R"({"__metadata__":{},"__metadata__":{},)" + w + "}", 4), "DUPLICATE_NAME", ""},
      {"a key", Safetensors(R"({"w":{"dtype":"F32","shape":[1],"dtype":"F64","data_offsets":[0,4]}})", 4), "BAD_HEADER",
       "w"},
  });
}

TEST_CASE("An entry without its three fields, or with fields of another kind, is refused") {
  CheckRefused({
      {"no dtype", Safetensors(R"({"w":{"shape":[1],"data_offsets":[0,4]}})", 4), "BAD_HEADER", "w"},
      {"no shape", Safetensors(R"({"w":{"dtype":"F32","data_offsets":[0,4]}})", 4), "BAD_HEADER", "w"},
      {"no offsets", Safetensors(R"({"w":{"dtype":"F32","shape":[1]}})", 4), "BAD_HEADER", "w"},
      {"no object", Safetensors(R"({"w":[1]})", 4), "BAD_HEADER", "w"},
      {"null", Safetensors(R"({"w":null})", 4), "BAD_HEADER", "w"},
      {"dtype a number", Safetensors(R"({"w":{"dtype":1,"shape":[1],"data_offsets":[0,4]}})", 4), "BAD_HEADER", "w"},
      {"an unknown dtype", Safetensors("{" + Entry("w", "f32", "[1]", 0, 4) + "}", 4), "BAD_DTYPE", "w"},
      {"shape a number", Safetensors("{" + Entry("w", "F32", "1", 0, 4) + "}", 4), "BAD_SHAPE", "w"},
      {"three offsets", Safetensors(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4,4]}})", 4), "BAD_HEADER",
       "w"},
      {"one offset", Safetensors(R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", 4), "BAD_HEADER", "w"},
  });
}

TEST_CASE("Dimensions are whole numbers and their product is exact") {
  CheckRefused({
      {"negative", Safetensors("{" + Entry("t", "F32", "[-1,-1]", 0, 4) + "}", 4), "BAD_SHAPE", "t"},
      {"a float", Safetensors("{" + Entry("t", "F32", "[1.0]", 0, 4) + "}", 4), "BAD_SHAPE", "t"},
      {"an exponent", Safetensors("{" + Entry("t", "F32", "[1e0]", 0, 4) + "}", 4), "BAD_SHAPE", "t"},
      {"a text", Safetensors("{" + Entry("t", "F32", "[\"1\"]", 0, 4) + "}", 4), "BAD_SHAPE", "t"},
      {"true", Safetensors("{" + Entry("t", "F32", "[true]", 0, 4) + "}", 4), "BAD_SHAPE", "t"},
      {"over 64 bits", Safetensors("{" + Entry("t", "U8", "[18446744073709551616]", 0, 0) + "}", 0), "BAD_HEADER", ""},
      {"wraps to 0", Safetensors("{" + Entry("t", "U8", "[4294967296,4294967296]", 0, 0) + "}", 0), "BAD_SHAPE", "t"},
      {"wraps with the width", Safetensors("{" + Entry("t", "F64", "[2305843009213693952]", 0, 0) + "}", 0),
       "BAD_SHAPE", "t"},
      {"ends inside a byte", Safetensors("{" + Entry("t", "F4", "[3]", 0, 2) + "}", 2), "BAD_SHAPE", "t"},
  });
}

TEST_CASE("Offsets, shapes and the file's end agree") {
  const std::string a = Entry("a", "F32", "[2]", 0, 8);
  CheckRefused({
      {"an empty range for one element", Safetensors("{" + Entry("w", "F32", "[1]", 0, 0) + "}", 0), "SIZE_MISMATCH",
       "w"},
      {"a shape larger than the range", Safetensors("{" + Entry("t", "F32", "[1000,1000]", 0, 4) + "}", 4),
       "SIZE_MISMATCH", "t"},
      {"begin after end", Safetensors("{" + Entry("a", "F32", "[2]", 8, 0) + "}", 8), "BAD_OFFSETS", "a"},
      {"negative", Safetensors(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}})", 8), "BAD_OFFSETS", "a"},
      {"a float", Safetensors(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0.0,8]}})", 8), "BAD_OFFSETS", "a"},
      {"one range for two", Safetensors("{" + a + "," + Entry("b", "F32", "[2]", 0, 8) + "}", 8), "BAD_OFFSETS", "b"},
      {"overlap", Safetensors("{" + a + "," + Entry("b", "F32", "[2]", 4, 12) + "}", 12), "BAD_OFFSETS", "b"},
      {"an empty one inside another", Safetensors("{" + a + "," + Entry("b", "F32", "[0]", 4, 4) + "}", 8),
       "BAD_OFFSETS", "b"},
      {"a gap", Safetensors("{" + a + "," + Entry("b", "F32", "[2]", 12, 20) + "}", 20), "BAD_OFFSETS", "b"},
      {"not from 0", Safetensors("{" + Entry("a", "F32", "[2]", 8, 16) + "}", 16), "BAD_OFFSETS", "a"},
      {"bytes after the last", Safetensors("{" + a + "}", 9), "BAD_OFFSETS", ""},
      {"the last byte missing", Safetensors("{" + a + "," + Entry("b", "F32", "[2]", 8, 16) + "}", 15), "TRUNCATED",
       "b"},
      {"no data at all", Safetensors("{" + Entry("t", "F32", "[1000,1000]", 0, 4000000) + "}", 0), "TRUNCATED", "t"},
      {"ends at 2^64 - 1", Safetensors("{" + a + "," + Entry("b", "U8", "[0]", ~uint64_t{0}, ~uint64_t{0}) + "}", 8),
       "BAD_OFFSETS", "b"},
      {"larger than any file",
       Safetensors("{" + Entry("t", "U8", "[2305843009213693951]", 0, 2305843009213693951) + "}", 8), "TRUNCATED", "t"},
  });
}

TEST_CASE("A model without a byte is refused") {
  CheckRefused({
      {"no tensors", Safetensors("{}      ", 0), "EMPTY_MODEL", ""},
      {"metadata only", Safetensors(R"({"__metadata__":{"k":"v"}})", 0), "EMPTY_MODEL", ""},
      {"empty tensors only", Safetensors("{" + Entry("w", "F32", "[0]", 0, 0) + "}", 0), "EMPTY_MODEL", ""},
  });
}

TEST_CASE("A file that is really something else is called by its name") {
  const struct {
    std::string image;
    const char* named;
  } kCases[] = {
      {"version https://git-lfs.github.com/spec/v1\noid sha256:" + std::string(64, '0') + "\nsize 4877660776\n",
       "Git LFS pointer"},
      {"<!DOCTYPE html><html><body>Not Found</body></html>", "web page"},
      {"\n  <HTML>", "web page"},
      {"<?xml version=\"1.0\"?><Error/>", "XML"},
      {std::string("PK\x03\x04\0\0\x08\x08\0\0\0\0\0\0\0\0", 16), "zip archive"},
      {"\x80\x02\x8a\nl\xfc\x9c\x46\xf9 j\xa8P\x19.", "pickle"},
      {std::string("GGUF\x03\0\0\0\0\0\0\0\0\0\0\0", 16), "GGUF"},
      {"{\"error\":\"Repository not found\"}", "JSON"},
  };
  CheckpointDir directory;
  for (const auto& c : kCases) {
    INFO(c.named);
    const std::string path = directory.Write("x.safetensors", c.image);
    CHECK(ReadBad(path).reason == "NOT_A_CHECKPOINT");
    CHECK(MessageOf(path).find(c.named) != std::string::npos);
  }
}

TEST_CASE("A file whose room was reserved and never filled is called that") {
  CheckpointDir directory;
  for (const uint64_t bytes : {8, 4096}) {
    const std::string path = directory.Write("x.safetensors", std::string(bytes, '\0'));
    CHECK(ReadBad(path).reason == "NOT_A_CHECKPOINT");
    CHECK(MessageOf(path).find("begins with zeros") != std::string::npos);
  }
}

TEST_CASE("A good file whose length reads like another format's first bytes is taken") {
  // 0x0280, as a pickle begins.
  std::string header = "{" + Entry("w", "U8", "[1]", 0, 1) + "}";
  header.resize(0x0280, ' ');
  CheckpointDir directory;
  CHECK(ReadGood(directory.Write("x.safetensors", Safetensors(header, 1))).components[0].tensors.size() == 1);
}

TEST_CASE("What is no regular file is refused without waiting for it") {
  CheckpointDir directory;
  const std::string fifo = directory.Path("fifo.safetensors");
  REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
  CHECK(ReadBad(fifo).reason == "NOT_A_CHECKPOINT");
  CHECK(MessageOf(fifo).find("FIFO") != std::string::npos);
  CHECK(ReadBad("/dev/zero").reason == "NOT_A_CHECKPOINT");
  std::filesystem::create_directory(directory.Path("m"));
  directory.Write("m/model.safetensors.index.json", R"({"weight_map":{"w":"s"}})");
  std::filesystem::create_directory(directory.Path("m/s"));
  CHECK(ReadBad(directory.Path("m")).file == directory.Path("m/s"));
  CHECK(MessageOf(directory.Path("m")).find("a directory, not a regular file") != std::string::npos);
  directory.Link("link.safetensors", "fifo.safetensors");
  CHECK(ReadBad(directory.Path("link.safetensors")).reason == "NOT_A_CHECKPOINT");
}

TEST_CASE("A path where nothing is, is refused as that") {
  CheckpointDir directory;
  const std::string file = directory.Write("x.safetensors", SafetensorsOf({"w"}));
  directory.Link("loop", "loop");
  directory.Link("dangling", "nowhere");
  for (const std::string& path : {directory.Path("y"), file + "/y", directory.Path("loop"), directory.Path("dangling"),
                                  directory.Path(std::string(5000, 'x'))}) {
    const absl::Status status = ReadManifest(path).status();
    CHECK(status.code() == absl::StatusCode::kNotFound);
    CHECK(ReasonOf(status) == "NO_SUCH_FILE");
  }
  CHECK(MessageOf(directory.Path("dangling")).find("symbolic link") != std::string::npos);
  CHECK(ReasonOf(StatSourceFile(directory.Path("y")).status()) == "NO_SUCH_FILE");
  // A NUL does not shorten a path to one that exists.
  CHECK(ReasonOf(ReadManifest(file + std::string("\0", 1)).status()) == "NO_SUCH_FILE");
  CHECK(ReadManifest("").status().code() == absl::StatusCode::kInvalidArgument);
}

TEST_CASE("A file that the system does not let us read is refused as unreadable, with the system's words") {
  CheckpointDir directory;
  const std::string path = directory.Write("x.safetensors", SafetensorsOf({"w"}));
  REQUIRE(::chmod(path.c_str(), 0) == 0);
  absl::Status status;
  // Who may read everything is somebody else for the file system, on this thread alone.
  std::thread([&] {
    ::setfsuid(65534);
    status = ReadManifest(path).status();
  }).join();
  INFO(status.ToString());
  CHECK(status.code() == absl::StatusCode::kPermissionDenied);
  REQUIRE(GetRefusal(status).has_value());
  CHECK(GetRefusal(status)->reason == "UNREADABLE");
  CHECK(GetRefusal(status)->file == path);
  CHECK(std::string(status.message()).find("Permission denied") != std::string::npos);
}

TEST_CASE("A file that became shorter since it was opened is said to be cut short, not malformed") {
  CheckpointDir directory;
  const absl::StatusOr<RegularFile> file = OpenRegularFile(directory.Write("x", std::string(100, 'x')), "NO_SUCH_FILE");
  REQUIRE(file.ok());
  std::filesystem::resize_file(directory.Path("x"), 60);
  std::string bytes(100, '\0');
  CHECK(ReadAt(*file, 0, 60, bytes.data()).ok());
  const absl::Status status = ReadAt(*file, 10, 90, bytes.data());
  CHECK(status.code() == absl::StatusCode::kDataLoss);
  CHECK(ReasonOf(status) == "FILE_TRUNCATED");
  CHECK(status.message() == directory.Path("x") + ": it ends at 60, but had 100 bytes when it was opened");
}

TEST_CASE("A name or a shape that no client could be sent is refused with the limit") {
  std::string ones = "1";
  for (int i = 1; i < 1024; ++i) ones += ",1";
  CheckpointDir directory;
  const auto file = [&](const std::string& name, const std::string& dimensions) {
    return directory.Write("x.safetensors",
                           Safetensors("{" + Entry(name, "U8", "[" + dimensions + "]", 0, 1) + "}", 1));
  };
  CHECK(ReadGood(file(std::string(4096, 'n'), ones)).components[0].tensors[0].shape.size() == 1024);
  CHECK(ReadBad(file(std::string(4097, 'n'), "1")).reason == "BAD_HEADER");
  CHECK(MessageOf(file(std::string(4097, 'n'), "1")).find("4097 bytes, the limit is 4096") != std::string::npos);
  CHECK(ReadBad(file("w", ones + ",1")).reason == "BAD_SHAPE");
  CHECK(MessageOf(file("w", ones + ",1")).find("1025 dimensions, the limit is 1024") != std::string::npos);
}

TEST_CASE("A hostile name neither breaks a line nor swells the message") {
  CheckpointDir directory;
  const std::string name = "a\\nOK: registered\\u001b[31m" + std::string(100'000, 'n');
  const std::string path = directory.Write("x.safetensors", Safetensors("{" + Entry(name, "F0", "[1]", 0, 1) + "}", 1));
  const std::string message = MessageOf(path);
  CHECK(message.size() < 2048);
  CHECK(std::none_of(message.begin(), message.end(), [](unsigned char c) { return c < 0x20; }));
}

TEST_CASE("Eighty thousand tensors are read, and no descriptor stays open") {
  std::string header = "{";
  for (int i = 0; i < 80'000; ++i) {
    header += (i == 0 ? "" : ",") + Entry("t." + std::to_string(i), "F32", "[1]", 4 * uint64_t(i), 4 * uint64_t(i) + 4);
  }
  CheckpointDir directory;
  const std::string path = directory.Write("x.safetensors", Safetensors(header + "}", 320'000));
  const size_t open_before = OpenDescriptors();
  const Manifest manifest = ReadGood(path);
  CHECK(OpenDescriptors() == open_before);
  const std::vector<LayoutComponent> components = ToLayoutComponents(manifest);
  REQUIRE(components.size() == 1);
  REQUIRE(components[0].tensors.size() == 80'000);
  CHECK(components[0].tensors[79'999].name == "t.79999");
  CHECK(components[0].tensors[79'999].bytes == 4);
}

// What a manifest promises, held against the file.
void CheckPromises(const Manifest& manifest) {
  uint64_t end = 0;
  for (const ManifestTensor& tensor : manifest.components[0].tensors) {
    REQUIRE(TensorBytes(tensor.dtype, tensor.shape) == tensor.bytes);
    REQUIRE(tensor.file_offset >= end);
    end = tensor.file_offset + tensor.bytes;
    REQUIRE(end >= tensor.file_offset);
  }
  REQUIRE(end == manifest.files[0].bytes);
}

TEST_CASE("A file damaged at random is refused or keeps every promise") {
  const std::string good = Safetensors(R"({"__metadata__":{"format":"pt"},)" + Entry("a", "F32", "[2,3]", 0, 24) + "," +
                                           Entry("b", "BF16", "[5,2]", 24, 44) + "," + Entry("c", "I64", "[]", 44, 52) +
                                           "," + Entry("d", "F4", "[0,7]", 52, 52) + "}",
                                       52);
  const uint64_t seed = 4242;
  std::mt19937_64 random(seed);
  CheckpointDir directory;
  int accepted = 0;
  for (int round = 0; round < 4000; ++round) {
    INFO("seed " << seed << ", round " << round);
    std::string image = good;
    for (uint64_t i = random() % 3 + 1; i > 0; --i) {
      const size_t at = random() % image.size();
      switch (random() % 4) {
        case 0:
          image[at] = static_cast<char>(random());
          break;
        case 1:
          image[at] = "0123456789-.e\"[]{},:"[random() % 20];
          break;
        case 2:
          image.erase(at, random() % 4);
          break;
        default:
          image.insert(at, image.substr(random() % image.size(), random() % 30));
      }
    }
    if (image.empty()) continue;
    const absl::StatusOr<Manifest> manifest = ReadManifest(directory.Write("x.safetensors", image));
    if (manifest.ok()) {
      ++accepted;
      CheckPromises(*manifest);
    } else {
      REQUIRE_FALSE(ReasonOf(manifest.status()).empty());
    }
  }
  // Damage to a tensor's bytes or its name is not seen, and is not rare.
  CHECK(accepted > 100);
}

}  // namespace
}  // namespace residency
