/* Stands in for a header that torch no longer ships. BytePS 0.2.5 only names these types in
 * prototypes that nothing calls, so forward declarations are enough. */
#pragma once

struct THByteTensor;
struct THIntTensor;
struct THLongTensor;
struct THFloatTensor;
struct THDoubleTensor;
