/* Runs the kernels compiled for another processor, for the tests of this one: see machine.py.

   Standard input says a function's name, the pieces of memory that it reads and writes, its whole numbers (addresses among
   them) and its float. Each piece is put where it lies in the other process, so that addresses mean the same here; back go
   what the function returned and the pieces. The calling conventions of Linux for x86-64 and AArch64 pass whole numbers and
   floats in places of their own, so one type of function serves all. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define PAGE 65536
#define MANY 24 /* whole numbers that a function may take */
typedef int64_t N;
typedef N (*Function)(N, N, N, N, N, N, N, N, N, N, N, N, N, N, N, N, N, N, N, N, N, N, N, N, float);

static void take(void *to, size_t size) {
  if (fread(to, 1, size, stdin) != size) exit(0); /* the other process has ended */
}

/* Memory at this address; exit status 3 where something of this program lies there. */
static void make_room(N from, N size) {
  static N *mine, count;
  for (N at = from / PAGE * PAGE; at < from + size; at += PAGE) {
    void *got = mmap((void *)at, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (got == (void *)at) {
      mine = realloc(mine, sizeof(N) * (count + 1));
      mine[count++] = at;
      continue;
    }
    N known = 0;
    for (N i = 0; i < count; i++) known |= mine[i] == at;
    if (!known) exit(3);
  }
}

int main(void) {
  for (;;) {
    char name[64];
    N count, n[MANY] = {0}, pieces[256][2], result;
    float real;
    take(name, sizeof name), take(&count, 8), take(pieces, 16 * count);
    for (N i = 0; i < count; i++) make_room(pieces[i][0], pieces[i][1]), take((void *)pieces[i][0], pieces[i][1]);
    take(n, sizeof n), take(&real, 4);
    Function function = (Function)dlsym(RTLD_DEFAULT, name);
    if (!function) return 4;
    result = function(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13], n[14], n[15],
                      n[16], n[17], n[18], n[19], n[20], n[21], n[22], n[23], real);
    fwrite(&result, 8, 1, stdout);
    for (N i = 0; i < count; i++) fwrite((void *)pieces[i][0], 1, pieces[i][1], stdout);
    fflush(stdout);
  }
}
