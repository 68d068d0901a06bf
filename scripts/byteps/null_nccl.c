/* NCCL for a group of one process per host, for tests of BytePS without a GPU.
 *
 * BytePS reduces and broadcasts among the GPUs of one host by NCCL before and after it talks to
 * its servers. With one worker per host every such collective is a copy, or nothing when it is in
 * place. A larger group is refused: this library could only give wrong sums.
 * Built against the real header, so that the compiler checks every signature.
 */
#include <nccl.h>
#include <string.h>

static size_t element_size(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
      return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 4;
  }
}

static ncclResult_t copy(const void *from, void *to, size_t count, ncclDataType_t type) {
  if (from != to) memmove(to, from, count * element_size(type));
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  memset(id, 0, sizeof *id);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
  (void)id;
  *comm = NULL;
  return size == 1 && rank == 0 ? ncclSuccess : ncclInvalidUsage;
}

const char *ncclGetErrorString(ncclResult_t result) {
  return result == ncclSuccess ? "no error" : "the null NCCL serves one process per host only";
}

ncclResult_t ncclGroupStart(void) { return ncclSuccess; }

ncclResult_t ncclGroupEnd(void) { return ncclSuccess; }

ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  (void)op, (void)root, (void)comm, (void)stream;
  return copy(from, to, count, type);
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  (void)root, (void)comm, (void)stream;
  return copy(from, to, count, type);
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  (void)op, (void)comm, (void)stream;
  return copy(from, to, count, type);
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  (void)comm, (void)stream;
  return copy(from, to, count, type);
}
