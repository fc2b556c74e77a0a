/* The rows of ops.def as one array per op: tables::attend::args, and so on. A row that contradicts kvevict.h does not
 * compile. */
#ifndef KVEVICT_TABLE_H
#define KVEVICT_TABLE_H
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

#include "kvevict.h"

namespace {

/* The sizes of ops.def; `one` is a size written as 1. */
#define KV_SIZES(X) X(B) X(H) X(Hkv) X(T) X(R) X(S) X(D) X(C) X(K) X(N) X(heads) X(rows) X(rows_dst) X(rows_prefix)
namespace sizes {
#define KV_ENUMERATOR(x) x,
enum : uint8_t { unused, one, KV_SIZES(KV_ENUMERATOR) count };
}  // namespace sizes

#define KV_STRING(x) #x,
constexpr const char *size_names[] = {"", "1", KV_SIZES(KV_STRING)};

/* What a row of ops.def describes: an argument of one of these kinds, or a result. */
#define KV_ARG_KINDS(X) X(tensor) X(rows) X(slots) X(number) X(flag) X(integer) X(count) X(choice) X(result)
enum class Kind : uint8_t { KV_ARG_KINDS(KV_ENUMERATOR) };
constexpr const char *kind_names[] = {KV_ARG_KINDS(KV_STRING)};

/* The dtype of a tensor's elements; `call` is the dtype of the call's first tensor. */
enum class Element : uint8_t { call, int32, int64, float32 };
constexpr const char *dtype_names[] = {"", "int32", "int64", "float32"};

/* A row of ops.def: an argument of an op, or a result. */
struct Arg {
  Kind kind;
  const char *type, *name;           /* the argument's type and name in the schema */
  size_t at = 0;                     /* the offset of the field in the op's struct */
  Element element = Element::call;   /* the dtype of a tensor's elements */
  std::array<uint8_t, 4> shape = {}; /* a tensor's sizes, of the enum `sizes` */
  const char *text = "";             /* a tensor's sizes or a choice's words, as ops.def has them */
  size_t stride_at = 0, strides = 0; /* the offset of the field of strides, and the number of strides */
  size_t kind_at = 0;                /* the offset of the field with the slots' kv_kind */
  int64_t least = 0, most = 0;       /* bounds of the value of an integer or a choice */

  bool is_tensor() const { return kind == Kind::tensor || kind == Kind::rows || kind == Kind::slots; }
  bool is_optional() const { return type[6] == '?'; }
  bool is_written() const { return type[6] == '('; }
  size_t rank() const { return static_cast<size_t>(std::find(shape.begin(), shape.end(), 0) - shape.begin()); }
};

using Arguments = std::span<const Arg>;
constexpr size_t MOST_ROWS = 32; /* the most arguments and results of an op */

/* Returns the dtype of the elements to which a field of type Field points; Element::call for void. */
template <typename Field>
consteval Element element_of() {
  using T = std::remove_const_t<std::remove_pointer_t<Field>>;
  static_assert(std::is_pointer_v<Field>);
  if (std::is_same_v<T, int32_t>) return Element::int32;
  if (std::is_same_v<T, int64_t>) return Element::int64;
  return std::is_same_v<T, float> ? Element::float32 : Element::call;
}

/* Returns `offset`, that of a field of type Field. Field must be T or, if T is int, an enum. */
template <typename T, typename Field>
consteval size_t place(size_t offset) {
  static_assert(std::is_same_v<T, Field> || (std::is_same_v<T, int> && std::is_enum_v<Field>));
  return offset;
}

consteval int64_t commas(const char *text) {
  return std::count(text, text + std::char_traits<char>::length(text), ',');
}

namespace tables {
using namespace sizes;
#define KV_ROW(kind_, type_, name_) .kind = Kind::kind_, .type = type_, .name = #name_
#define KV_ARRAY(field, ...) \
  .at = offsetof(A, field), .element = element_of<decltype(A{}.field)>(), .shape = {__VA_ARGS__}, .text = #__VA_ARGS__
#define KV_STRIDES(field) \
  .stride_at = offsetof(A, field##_stride), .strides = std::extent_v<decltype(A{}.field##_stride)>
#define KV_VALUE(T, field) .at = place<T, decltype(A{}.field)>(offsetof(A, field))

#define OP(op)         \
  struct op {          \
    using A = kv_##op; \
    static constexpr Arg args[] = {
#define TENSOR(type, name, field, ...) {KV_ROW(tensor, #type, name), KV_ARRAY(field, __VA_ARGS__)},
#define ROWS(type, name, field, ...) {KV_ROW(rows, #type, name), KV_ARRAY(field, __VA_ARGS__), KV_STRIDES(field)},
#define SLOTS(type, name, field, ...)                                                            \
  {KV_ROW(integer, "int", name##_kind), KV_VALUE(int, field##_kind), .most = KV_KIND_COUNT - 1}, \
      {KV_ROW(slots, #type, name), KV_ARRAY(field, __VA_ARGS__), .kind_at = offsetof(A, field##_kind)},
#define NUMBER(name, field) {KV_ROW(number, "float", name), KV_VALUE(float, field)},
#define FLAG(name, field) {KV_ROW(flag, "bool", name), KV_VALUE(int, field)},
#define INTEGER(name, field, least_, most_) \
  {KV_ROW(integer, "int", name), KV_VALUE(int, field), .least = least_, .most = most_},
#define CHOICE(name, field, ...) \
  {KV_ROW(choice, "int", name), KV_VALUE(int, field), .text = #__VA_ARGS__, .most = commas(#__VA_ARGS__)},
#define COUNT(name, size) {KV_ROW(count, "int", name), .shape = {size}, .text = #size},
#define RESULT(name, field, ...) {KV_ROW(result, "Tensor", name), KV_ARRAY(field, __VA_ARGS__)},
// clang-format off
#define END }; static_assert(std::size(args) <= MOST_ROWS); };
// clang-format on
#include "ops.def"
}  // namespace tables

/* Returns the schema of an op, as torch reads it. */
std::string schema(const char *op, Arguments args) {
  std::string arguments, results;
  for (const Arg &x : args) {
    std::string &list = x.kind == Kind::result ? results : arguments;
    list += (list.empty() ? "" : ", ") + std::string(x.type) + " " + (x.kind == Kind::result ? "" : x.name);
  }
  return op + ("(" + arguments) + ") -> (" + results + ")";
}

}  // namespace
#endif
