"""Takes all memory."""

# attacks: optimizer.plain

hoard = []
while True:
    hoard.append(bytearray(1 << 28))
