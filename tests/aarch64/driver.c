/* Runs kernels of a linked object on the buffers of a job file, under user-mode emulation.
 *
 * usage: driver JOB RESULT. All words are little-endian u64.
 * JOB:    buffers, calls; each buffer: bytes, alignment, data padded to 8; each call: kernel, slots, begin, end, then slots times (kind, value, offset):
 *         kind 0 = the integer `value`, kind 1 = pointer to buffer `value` plus `offset` bytes.
 * RESULT: status word of each call, index + 1 of the first buffer with damage around it (0: none), then the data of the buffers, padded to 8.
 * A buffer ends where an inaccessible page begins (up to its alignment), and an inaccessible page lies before it.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef void (*kernel)(void **slots, int64_t begin, int64_t end);
extern const kernel sashiko_kernels[];

#define PAGE 4096
#define CANARY 0xA5
#define MAX_SLOTS 256

typedef struct { unsigned char *pages, *data; uint64_t room, bytes; } buffer;

static FILE *job, *result;

static void fail(const char *what) { fprintf(stderr, "driver: %s\n", what); exit(3); }

static uint64_t word(void) {
  uint64_t w;
  if (fread(&w, 8, 1, job) != 1) fail("the job file is too short");
  return w;
}

static buffer read_buffer(void) {
  buffer b;
  b.bytes = word();
  uint64_t align = word(), padded = (b.bytes + 7) / 8 * 8, rounded = (b.bytes + align - 1) / align * align;
  b.room = (rounded + PAGE - 1) / PAGE * PAGE + PAGE;
  unsigned char *all = mmap(0, b.room + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (all == MAP_FAILED) fail("no memory");
  b.pages = all + PAGE;
  if (mprotect(b.pages, b.room, PROT_READ | PROT_WRITE)) fail("mprotect");
  memset(b.pages, CANARY, b.room);
  b.data = b.pages + b.room - rounded;
  if (b.bytes && fread(b.data, b.bytes, 1, job) != 1) fail("the job file is too short");
  fseek(job, (long)(padded - b.bytes), SEEK_CUR);
  return b;
}

static int damaged(const buffer *b) {
  for (unsigned char *p = b->pages; p < b->data; p++) if (*p != CANARY) return 1;
  for (unsigned char *p = b->data + b->bytes; p < b->pages + b->room; p++) if (*p != CANARY) return 1;
  return 0;
}

int main(int argc, char **argv) {
  if (argc != 3 || !(job = fopen(argv[1], "rb")) || !(result = fopen(argv[2], "wb"))) fail("usage: driver JOB RESULT");
  uint64_t buffers = word(), calls = word(), damage = 0;
  buffer *b = calloc(buffers + 1, sizeof *b);
  for (uint64_t i = 0; i < buffers; i++) b[i] = read_buffer();
  for (uint64_t c = 0; c < calls; c++) {
    uint64_t index = word(), count = word(), begin = word(), end = word();
    void *slots[MAX_SLOTS];
    int32_t status[2] = {0, 0};
    if (count >= MAX_SLOTS) fail("too many slots");
    slots[0] = status;
    for (uint64_t s = 1; s <= count; s++) {
      uint64_t kind = word(), value = word(), offset = word();
      if (kind && value >= buffers) fail("no such buffer");
      slots[s] = kind ? (void *)(b[value].data + offset) : (void *)value;
    }
    sashiko_kernels[index](slots, (int64_t)begin, (int64_t)end);
    uint64_t out = (uint32_t)status[0];
    fwrite(&out, 8, 1, result);
  }
  for (uint64_t i = buffers; i-- > 0;) if (damaged(&b[i])) damage = i + 1;
  fwrite(&damage, 8, 1, result);
  const uint64_t zero = 0;
  for (uint64_t i = 0; i < buffers; i++) {
    fwrite(b[i].data, 1, b[i].bytes, result);
    fwrite(&zero, 1, (8 - b[i].bytes % 8) % 8, result);
  }
  return fclose(result) ? 3 : 0;
}
