"""Lists the words that training prompts are made of; none of the built-in evaluation prompts uses them."""

from __future__ import annotations


def _split(words: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in words.replace("\n", " ").split(";") if word.strip())


NAMES = _split(
    """Anna; Ben; Carla; David; Elena; Felix; Grace; Hugo; Irene; Jonas; Karin; Leo; Mara; Nadia; Oscar; Paula; Quentin;
    Rosa; Samuel; Tessa; Umar; Vera; Walter; Ximena; Yusuf; Zoe; Amir; Bianca; Cyrus; Diana; Emil; Farah; Gustav; Helen;
    Ivan; Julia; Kofi; Laura; Miguel; Noor; Olga; Pedro; Rania; Stefan; Thea; Viktor; Wendy; Yara; Anton; Beatriz"""
)
SURNAMES = _split(
    """Almeida; Brandt; Castillo; Dubois; Eriksen; Ferrari; Garcia; Hoffman; Ibrahim; Jensen; Kowalski; Larsen; Moreau;
    Nakamura; Okafor; Petrov; Quinn; Rossi; Schmidt; Tanaka; Ueda; Vargas; Whitfield; Yilmaz; Zimmer; Abbott; Banerjee;
    Carter; Delgado; Evans; Fischer; Grant; Hughes; Iversen; Johansson; Keller; Lopez; Murphy; Novak; Olsen"""
)
CITIES = _split(
    """Lisbon; Vienna; Toronto; Nairobi; Seattle; Dublin; Prague; Madrid; Boston; Chicago; Hamburg; Lyon; Kyoto; Cairo;
    Denver; Geneva; Helsinki; Jakarta; Krakow; Lima; Manila; Naples; Ottawa; Porto; Quito; Riga; Sydney; Tallinn;
    Utrecht; Valencia; Warsaw; York; Zurich; Athens; Bergen; Cardiff; Dallas; Edinburgh; Florence; Ghent"""
)
STREETS = _split(
    """Maple Street; Station Road; Oak Avenue; Mill Lane; Church Street; Harbour Road; Garden Row; Elm Drive; King
    Street; Bridge Street; Park Avenue; Hill Road; Cedar Lane; Market Square; River Walk; Victoria Road; Queen Street"""
)
ROLES = _split(
    """manager; analyst; teacher; nurse; driver; editor; chef; clerk; developer; tester; lawyer; pilot; plumber; writer;
    architect; baker; doctor; farmer; painter; guide"""
)
DAYS = _split("Monday; Tuesday; Wednesday; Thursday; Friday; Saturday; Sunday")
MONTHS = _split("January; February; March; April; May; June; July; August; September; October; November; December")
THINGS = _split(
    """apples; bottles; chairs; doors; envelopes; flowers; gloves; hats; jars; keys; lamps; maps; notebooks; oranges;
    pencils; plates; ropes; shoes; tables; umbrellas; windows; boxes; coats; drums; eggs; forks; cups; books; pears;
    screws; tickets; towels; stamps; spoons; shirts; rings; pots; nails; mugs; candles"""
)
LISTABLE = _split(
    """the planets of the solar system; the days of the week; the colors of the rainbow; the continents; the oceans;
    ten fruits; ten vegetables; ten countries in Europe; ten countries in Asia; ten animals that live in the sea;
    ten birds; ten trees; ten musical instruments; ten sports; ten school subjects; ten jobs; ten kinds of food;
    ten pieces of furniture; ten kitchen tools; ten items of clothing; ten programming languages; ten rivers;
    ten capital cities; ten insects; ten flowers; ten metals; ten chemical elements; ten inventions; ten famous books;
    ten languages; ten desserts; ten breakfast foods; ten board games; ten dog breeds; ten tools for the garden;
    the seasons of the year; the numbers from one to twenty in words; the even numbers up to forty; the vowels;
    the first ten prime numbers; the first ten square numbers; the multiples of nine up to ninety; ten spices;
    ten kinds of cheese; ten hobbies; ten means of transport; ten gemstones; ten parts of the body; the five senses;
    ten American states; ten islands; ten mountains; ten verbs; ten adjectives; ten things to pack for a trip"""
)
EXTRAS = _split(
    """with a short description; one per line; in alphabetical order; with an example; numbered from one;
    each followed by a colon and one fact; as a numbered list; as a bulleted list; each with its number of letters;
    and after each one a word that rhymes; with one sentence about each; separated by commas"""
)
TOPICS = _split(
    """gardening; coffee; the moon; volcanoes; dogs; cats; budgeting; yoga; bread; chess; the ocean; bees;
    photosynthesis; electricity; magnets; the Roman Empire; the water cycle; vaccines; exercise; stress; reading;
    writing; running; swimming; cooking pasta; soup; vegetables; recycling; solar power; wind turbines; cars; trains;
    airplanes; bicycles; computers; passwords; the internet; email; phones; photography; painting; music; the guitar;
    the piano; singing; dancing; theatre; movies; history; geography; maps; mountains; rivers; deserts; forests; rain;
    snow; thunder; wind; earthquakes; the sun; stars; planets; gravity; atoms; water; salt; sugar; honey; tea;
    chocolate; cheese; milk; eggs; rice dishes; fish; birds; insects; spiders; snakes; horses; cows; sheep; whales;
    sharks; dinosaurs; fossils; rocks; gold; iron; glass; paper; wood; plastic; cotton; wool; shoes; houses; bridges;
    towers; schools; teachers; exams; homework; libraries; museums; hospitals; doctors; dentists; headaches; colds; sore
    throats; back pain; teeth; skin; hair; eyes; glasses; ears; the heart; the brain; memory; dreams; habits; patience;
    friendship; kindness; honesty; anger; fear of flying; public speaking; making friends; saying no; saving money;
    taxes; insurance; rent; moving house; neighbours; noise; cleaning; laundry; ironing; stains; mold; paint; lamps;
    batteries; plants; roses; tomatoes; lawns; compost; weeds; birthdays; weddings; gifts; holidays; camping; hiking;
    packing; jet lag; learning a language; Spanish; grammar; spelling; essays; poems; novels; newspapers; advertising;
    small businesses; job applications; resumes; meetings; teamwork; leadership; working from home; time management;
    procrastination; motivation; meditation; breathing; walking; weight training; stretching; marathon training;
    football; tennis; basketball; fishing; sewing; knitting; origami; magic tricks; puzzles; mathematics; fractions;
    percentages; statistics; probability; geometry; algebra; Python; databases; spreadsheets; robots; artificial
    intelligence; encryption; backups; video games"""
)
QUESTIONS = _split(
    """What is {t} and why does it matter?; How can I learn more about {t}?; Explain {t} to a ten-year-old.; What are
    the most important facts about {t}?; Give me five tips about {t}.; Why do people care about {t}?; What are common
    mistakes with {t}?; How did {t} change over time?; I want to get better at {t}. Where do I start?; Tell me something
    surprising about {t}.; What are the advantages and disadvantages of {t}?; How would you explain {t} in simple
    words?; What should a beginner know about {t}?; Can you help me with {t}? I do not know much about it.; What
    questions should I ask about {t}?; My friend is interested in {t}. What would you recommend?; How does {t} work?;
    What is the best way to deal with {t}?; I have a problem with {t}. What can I do?; Write a short introduction to
    {t}.; What are the benefits of {t}?; How much time does it take to understand {t}?; What is the history of {t}?; Is
    {t} good for you?; What do I need to know about {t} before the weekend?; Describe {t} in three sentences.; What are
    some good habits related to {t}?; How do experts think about {t}?; What equipment do I need for {t}?; Why is {t}
    difficult for many people?; How can parents teach children about {t}?; Compare {t} with {u}.; What do {t} and {u}
    have in common?; Which is more useful to know about, {t} or {u}?; Where can I find help with {t}?; How should I talk
    about {t} with my family?; What does science say about {t}?; Plan a lesson about {t}.; I am worried about {t}. How
    should I prepare?; Give me step by step advice on {t}."""
)
PEOPLE = _split(
    """a fisherman; a young girl; an old soldier; a clockmaker; a librarian; a thief; a widow; a gardener; a pianist;
    a shepherd; a doctor; a detective; a baker; a ghost; a painter; a sailor's daughter; a scientist; a postman;
    a robot; a dragon; a queen; a boy who could not speak; a traveller; a blind man; twin sisters; a teacher; a king;
    a carpenter; a spy; a wolf; a nurse; a taxi driver; a stranger; an astronaut; a farmer; a knight; a magician"""
)
PLACES = _split(
    """a forest; a small town by the river; a desert; an empty hotel; a mountain village; a train; a city at night; a
    castle; an island; a library; a market; a ship; a hospital; a farm; a school; a museum; a cave; a garden; a theatre;
    a ruined church; a border crossing; a space station; a valley; a harbour; a bridge; an old house; a bakery; a
    swamp"""
)
OBJECTS = _split(
    """a key; a map; a broken watch; a photograph; a book with no title; a coin; a violin; a mirror; a locked box; a
    ring; a diary; a candle; a compass; a red scarf; a seed; a telegram; a feather; a painting; a lantern; a stone; a
    bell; a knife; a doll; a music box; a crown; a ticket; a telescope; a shell; a pair of boots; an umbrella; a
    portrait"""
)
MOODS = _split(
    """quiet; angry; hopeful; tired; strange; bright; lonely; grey; golden; bitter; sweet; cold; warm; dark; silent;
    restless; gentle; empty; endless; sudden"""
)
SEASONS = _split(
    "spring; summer; winter; rain; the harvest; the new year; a long night; an early morning; a late train"
)
VERBS = _split(
    "get; set; load; save; find; update; remove; create; print; read; write; check; parse; count; sort; merge"
)
NOUNS = _split(
    """user; order; product; account; message; file; record; item; report; student; book; player; invoice; event; image;
    task; customer; vehicle; ticket; score; session; token; node; page; address; payment; device; song; movie; recipe"""
)
FIELDS = _split(
    """name; price; size; weight; title; author; email; phone; city; age; status; count; level; date; score; owner;
    code; label; speed; height; balance; rating; length; depth; brand"""
)
TASKS = _split(
    """reverses a string; checks whether a number is prime; computes the factorial of a number; counts the vowels in a
    string; finds the largest number in a list; removes duplicates from a list; merges two sorted lists; sorts a list of
    numbers with bubble sort; checks whether a word is a palindrome; converts Celsius to Fahrenheit; computes the n-th
    Fibonacci number; reads a file and counts its lines; sums the digits of a number; finds the common elements of two
    lists; flattens a nested list; counts how often each word appears in a text; computes the average of a list; finds
    the greatest common divisor of two numbers; checks whether two strings are anagrams; computes the area of a circle;
    converts a number to binary; validates an email address; generates a random password; rotates a list; implements a
    stack; implements a queue; implements a linked list; reverses a linked list; finds the shortest word in a sentence;
    capitalizes every word; transposes a matrix; multiplies two matrices; checks for balanced brackets; computes a power
    without using the operator; finds the second largest number; filters even numbers; splits a list into chunks;
    computes compound interest; reads a CSV file; writes a dictionary to a JSON file; downloads a page; logs errors;
    checks whether a year is a leap year; prints a multiplication table; swaps two variables; finds missing numbers"""
)
LANGUAGES = _split("Python; Python; Python; Python; JavaScript; Java; C; Go")
SENTENCES = _split(
    """The bridge over the {m} river was closed in {y} because the {o} had begun to rust.;
    {n} {s} bought the {m} house on {st} in {y} and repaired the roof with the help of two neighbours.;
    The museum in {c} keeps more than {k} letters, and most of them have never been read.;
    Every {d} the market in {c} opens at seven, and by noon the fish is sold.;
    The train to {c} leaves at {h} from platform {p}, and passengers must change once.;
    {n} {s} will bring the documents to the office in {c} on {d}.;
    {n} works as a {r} in {c} and walks {p} kilometres to the office.;
    The school needs {k} new {th} before the end of {mo}.;
    A storm in {mo} {y} destroyed the harbour and {p} of the boats.;
    The company sold {k} {th} last year, which was {p} percent more than the year before.;
    Visitors may enter the garden from {h} until sunset, but dogs must stay outside.;
    {n} and {n2} have agreed to share the cost of the {th}.;
    The committee chose {n} {s} as {r}, and {n2} will help during the first {p} weeks.;
    Water boils faster at a lower pressure, so cooking takes longer in the mountains.;
    The old mill was built in {y} from stone that came from a quarry near {c}.;
    The invoice of {d} lists {p} {th} at {k} dollars, and the payment is due in {mo}.;
    Swallows leave the valley in {mo} and return when the first insects appear.;
    The doctor asked {n} to rest for {p} days and to drink enough water.;
    The library lends every book for {p} weeks, and {n2} keeps the list of late returns.;
    The recipe needs {p} eggs, some flour, and a little salt, and it takes about an hour.;
    Workers found {k} coins under the floor of a house on {st} in {c}.;
    The team from {c} won {p} games in a row before it lost to its oldest rival.;
    {n2} {s} wrote to the council about the noise on {st}, and the answer came in {mo}.;
    The new road will save drivers about {p} minutes, according to {n} {s}, who planned it."""
)
