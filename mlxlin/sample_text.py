"""A text to measure models on: prose, explanation, dialogue, code, numbers, another language. Written for mlxlin."""

TEXT = """The lighthouse keeper counted the steps every evening, although he knew there were one hundred and twelve. \
On the way up he thought about the weather, and on the way down about supper. When the fog came in, the sea \
seemed to disappear, and the only proof that it was still there was the slow sound of the waves against the \
rocks. "You could write a letter to anyone," his sister had told him, "but you would have to row across the \
bay to post it."

A river carries sediment from the mountains to the sea. Where the water slows down, sand and mud settle on the \
bottom, and over thousands of years a delta grows. The same happens on a small scale after heavy rain: look at \
the fans of fine gravel at the lower end of a garden path. The faster the water, the larger the stones it can \
move, which explains why the upper course of a river is full of boulders while its mouth is lined with silt.

Question: What is the capital of France, and which river flows through it?
Answer: The capital of France is Paris, and the river Seine flows through it.

Question: A train leaves at 9:40 and arrives at 12:05. How long does the journey take?
Answer: From 9:40 to 12:05 is two hours and twenty-five minutes, or 145 minutes.

def running_mean(values, width):
    \"\"\"Mean of every window of `width` neighbouring values.\"\"\"
    total = sum(values[:width])
    means = [total / width]
    for i in range(width, len(values)):
        total += values[i] - values[i - width]
        means.append(total / width)
    return means

The months of the year are January, February, March, April, May, June, July, August, September, October, \
November and December. The first ten square numbers are 1, 4, 9, 16, 25, 36, 49, 64, 81 and 100.

Am Morgen lag Schnee auf den Dächern. Die Kinder liefen hinaus, bauten einen Mann aus drei großen Kugeln und \
gaben ihm eine Nase aus Holz. Gegen Mittag kam die Sonne, und am Abend stand nur noch der Hut auf der nassen \
Wiese.

To make bread you need flour, water, salt and yeast. Mix them, knead the dough for ten minutes, cover it, and \
let it rest for an hour. Shape a loaf, let it rise again, and bake it until the crust is brown and the bottom \
sounds hollow.
"""
