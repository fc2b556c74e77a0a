"""Lists the material of the generated haystack: words for each `{slot}`, and sentence templates with `{slot}`s."""

_WORDS = {
    "noun": """account acorn almanac anchor anvil apron arch archway attic awning axle badge bakery balcony barge
    barley barn barrel basin basket bathhouse battery beacon bell bellows bench blanket boat boiler bonfire bookcase
    boot bottle boulder bowl bracelet bramble brick bridge brooch broom bucket button cabin cabinet candle canoe
    canvas carpet cart cartwheel cavern cellar chain chair chandelier chapel chart chest chimney chisel cistern cliff
    clock cloak coach cobbler coin compass copper corridor cottage counter cradle crane crate crown cupboard curtain
    cushion dairy desk diary ditch door drawer drum dune easel elm engine envelope farm feather fence ferry fiddle
    field flagpole flask flute footpath forge fountain furnace gallery garden garret gate glacier glove goblet granary
    gravel greenhouse grindstone guitar hammer hammock hamper harbour harness hat hearth hedge helmet hill hinge
    honeycomb hook horn inkwell island jacket jar jetty journal jug kettle key kiln kite knapsack ladder
    lagoon lamp lantern lattice ledger lens letter library lighthouse locket locomotive loft loom lute mantel map
    marble market mask meadow medal mill mirror mitten moat monument moss museum napkin needle nest net notebook oar
    oak orchard organ oven paddle painting pantry parasol parcel pasture path pavilion pebble pendulum piano picture
    pier pillar pillow pipe pitcher plank plough pond porch portrait pot press printer pulley pump quarry quill quilt
    raft railing rake ribbon ring river road roof rope rudder rug saddle sail satchel saucer scaffold scarf scroll
    shed shelf shell shore shovel shutter sieve signal sketch sleigh smokehouse spade spindle spoon spring
    square stable staircase statue steeple stool stove stream street studio sundial swing table tapestry teapot
    telescope tent terrace thimble thread tile timber toolbox torch tower trail tray trellis trough trunk tunnel
    turret umbrella valley vase veil veranda vessel vineyard violin wagon walnut wardrobe warehouse watch waterfall
    well wharf wheel whistle willow windmill window wreath yard""",
    "adj": """amber ancient angular ashen battered blackened blue borrowed brass bright brittle broad bronze broken
    brown carved chalky cheap clean coarse cold copper cracked crimson crooked curious damp dark deep delicate distant
    dusty early eastern elegant empty enormous faded fallen familiar famous fine flat foreign forgotten fragile
    freezing frosty gentle gilded gleaming glossy golden graceful grand green grey half-finished handsome heavy hidden
    hollow humble icy idle immense iron ivory jagged joyful knotted lacquered large leather little lively lonely long
    lopsided low marble mended mild modest mossy muddy mysterious narrow neat neglected new noble northern oaken odd
    oiled old open orange ordinary ornate painted pale patched peculiar plain pleasant polished private proud purple
    quaint quiet ragged rare red remote restored rotten rough round rusty salty scarlet second secret shabby shallow
    sharp shining silent silver simple slender small smoky smooth soft solid southern spare splendid square stained
    steep stiff stony straight strange striped sturdy sunny swift tall tangled thick thin tidy timeworn tiny twisted
    uneven unusual upper vast velvet violet warm weathered western wet white wide wild winding wooden woollen
    worn yellow young""",
    "did": """admired auctioned bought built burned carried cleaned collected counted covered decorated delivered
    described designed discovered displayed emptied examined exchanged fetched filled finished fixed followed found
    gathered guarded ignored imagined improved inherited inspected invented labelled leased lent lifted locked
    lost lowered measured mended mentioned missed moved noticed offered opened ordered packed painted photographed
    pledged polished praised purchased pushed raised recognised refused remembered removed rented repaired replaced
    returned sheltered shifted sketched sold stored studied surveyed swept tested tied touched traded transported
    unlocked unpacked visited washed watched weighed wrapped""",
    "she": """Adelaide Agnes Alma Beatrice Bertha Cecily Clara Cordelia Daphne Dorothea Edith Eleanor Esther Flora
    Georgina Harriet Helena Ingrid Isolde Josephine Lavinia Louisa Mabel Margery Matilda Millicent Nora Octavia
    Ottilie Philippa Rosalind Sabina Sophronia Susannah Theodora Ursula Viola Winifred Yolanda Zenobia""",
    "he": """Ambrose Archibald Barnaby Bertram Caspar Cedric Clement Conrad Cuthbert Desmond Edmund Ernest Felix
    Ferdinand Gilbert Godfrey Hector Horace Hubert Ignatius Jasper Jerome Lambert Leander Leopold Magnus Mortimer
    Nathaniel Oswald Percival Quentin Reginald Roderick Rupert Silas Sylvester Thaddeus Tobias Valentine Wendell""",
    "place": """Aldermoor Ashcombe Barrowdene Birchwater Blackmere Bramling Calderwick Coldharbour Copperfell Dunmarsh
    Eastbrook Elmhollow Fernleigh Foxcliff Glenhallow Greywick Hartsford Hazelmoor Ivybridge Kestrelby Larkhill
    Longmere Marlowe Millbrook Nettleford Oakhaven Otterbourne Pinewick Quarrydale Ravensby Redcastle Rookhurst
    Saltmarsh Stonebeck Thistledown Underhill Wexmoor Whitford Willowby Yarrowdale""",
    "trade": """actor apothecary architect baker barber beekeeper blacksmith bookbinder botanist brewer butcher
    captain carpenter chemist clerk clockmaker cook cooper doctor farmer fisherman florist gardener gatekeeper
    geologist glazier gravedigger grocer hatter innkeeper jeweller judge librarian locksmith magistrate mason mayor
    merchant midwife miller musician nurse painter pilot plumber porter postman potter priest professor sailor
    sculptor shepherd shoemaker soldier stonecutter surgeon tailor tanner teacher tinker tutor watchman weaver
    wheelwright""",
    "by": """above against along around behind below beneath beside beyond by inside near opposite past under""",
    "how": """absently angrily awkwardly bravely briefly brightly calmly carefully cautiously cheerfully clumsily
    coldly gladly gracefully gravely hastily honestly hurriedly idly kindly lazily loudly meekly neatly nervously
    obediently openly patiently politely promptly proudly quickly quietly readily reluctantly rudely secretly silently
    slowly softly solemnly steadily stubbornly suddenly swiftly thoughtfully unwillingly warmly wearily wisely""",
    "went": """climbed drifted hurried marched rode rushed sailed slipped strolled travelled trudged walked wandered
    crept drove rambled returned stumbled""",
    "felt": """ashamed amused anxious astonished bored bitter calm confused content curious delighted doubtful eager
    embarrassed faint grateful grieved hopeful impatient jealous melancholy merry nervous offended pleased proud
    puzzled relieved restless satisfied sorry surprised suspicious tired troubled uneasy weary""",
    "stuff": """barley bread butter chalk charcoal cheese cinnamon clay coal cotton flour ginger glass hay honey ink
    lace lavender leather linen milk mustard oil paper pepper salt sand silk soap straw sugar tar tea tin tobacco
    vinegar wax wine wool""",
    "sky": """bitter breezy bright chilly cloudy damp dreary dry fair foggy frosty gloomy hot mild misty overcast
    pleasant rainy snowy stormy sultry thundery warm wet windy""",
    "beast": """badger blackbird bull calf cat colt cow crow dog donkey duck eagle falcon ferret finch fox goat goose
    hare hawk hedgehog hen heron horse lamb magpie mare mouse mule otter owl ox parrot pigeon pony rabbit raven
    rooster sheep sparrow squirrel swallow swan toad trout turtle weasel wolf wren""",
    "ship": """Albatross Constance Corsair Endeavour Fortune Gannet Halcyon Kittiwake Meridian Perseverance Petrel
    Providence Prudence Resolute Swallow Tern""",
    "house": """bakery bathhouse boathouse brewery chapel granary infirmary library lighthouse museum observatory
    school station tannery theatre warehouse""",
    "surname": """Ashdown Brandreth Colley Dunmore Everard Fairfax Garrick Holloway Ingram Jessop Kimber Lockwood
    Merrick Norwood Oakes Penrose Quill Radley Selwyn Tarrant Underwood Venn Wardle Yelland""",
    "colour": "amber black blue brass copper crimson golden green grey ivory purple scarlet silver white yellow",
    "month": "January February March April May June July August September October November December",
}
LISTS = {slot: words.split() for slot, words in _WORDS.items()}
_WHEN = """after breakfast, after dark, after the harvest, after the storm, at dawn, at dusk, at midnight, at noon,
before sunrise, before the frost, before the wedding, by the end of autumn, during the fair, during the long winter,
early in spring, in the afternoon, in the evening, in the dry season, late in summer, long ago, on a foggy morning, on
the first cold day, on market day, on the last day of the month, one rainy afternoon, one quiet Sunday, that same
night, the following week, the next morning, years later, towards evening, when the bells rang"""
LISTS["when"] = _WHEN.replace("\n", " ").split(", ")

# {A} and {B} are a paragraph's two people, {P} its place; {he} and {his} are pronouns for {A}. A slot whose name begins
# with a capital letter, such as {When}, gets a capitalised word.
_TEMPLATES = """{A} {did} the {adj} {noun} {by} the {noun}.
{When}, {B} {did} a {adj} {noun} in {P}.
The {trade} of {P} {did} the {noun} {how}.
{A} was a {trade}, and {his} {noun} was {adj}.
It was a {sky} day in {P}.
Nobody in {P} had {did} a {noun} so {adj}.
{A} and {B} {went} to {place} {when}.
A {beast} slept {by} the {adj} {noun}.
{B} {how} asked the {trade} about the {noun}, but the {trade} only {did} it.
{When}, the weather turned {sky} and {sky}.
The {noun} smelled of {stuff} and {stuff}.
{A} sold {stuff} in {place} and bought {stuff} in {place}.
"The {noun} is too {adj}," said {A} {how}.
"Who {did} my {noun}?" asked {B}.
{A} felt {felt} and {went} {how} home.
{His} {noun} was made of {adj} {stuff}.
There was a {adj} {noun} {by} every {noun} in {place}.
{A} said that {he} felt {felt}.
Between the {noun} and the {noun} stood a {adj} {trade}.
{B} {did} the {noun} because it was {adj}.
Then {he} {went} to {P}.
The people of {place} {did} every {noun} they could find.
{When} the {beast} and the {beast} {went} {by} the {noun}.
{A} wrote a letter about the {noun} to the {trade} of {place}.
Although {he} was {felt}, {A} {did} the {adj} {noun}.
The road from {place} to {place} was {adj} and {sky}.
{B} wanted a {noun} of {stuff}, not a {noun} of {stuff}.
It is said in {P} that a {beast} once {did} a {noun}.
If the {noun} had been {adj}, {B} would have felt {felt}.
A {trade} and a {trade} {did} the same {noun} {when}.
{A} kept the {stuff} {by} the {noun} and the {stuff} {by} the {noun}.
The {trade} {how} {did} the {noun}, and {B} {how} {did} the {noun}.
No other {trade} owns a {noun} as {adj} as this.
{His} {noun} fell {how} from the {adj} {noun}.
{When}, {A} found {stuff} {by} the {noun} of the {trade}.
{B} was {felt}.
What {A} had {did} {when} was not a {noun} but a {noun}.
The {adj} {noun} belonged to a {trade} from {place}.
{B} dreamed of a {noun} full of {stuff}.
No {trade} was ever more {felt} than {B} was {when}.
The {noun} looked {adj}.
In {place}, unlike in {P}, each {trade} has a {noun}.
{A} promised the {trade} a {beast} and some {stuff}.
The {adj} {beast} {went} {by} the {noun} and {did} nothing.
{Place} is known for {stuff}, {stuff} and a {adj} {noun}.
{When}, the {trade} told {A} how {B} had {did} the {noun}.
They {how} {did} the {noun} and then {went} {by} the {noun}.
"I have {did} neither the {noun} nor the {noun}," the {trade} answered {how}.
The {noun}, {adj} and {adj}, was {A}'s."""
TEMPLATES = _TEMPLATES.splitlines()
