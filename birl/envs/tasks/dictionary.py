"""Common English words, for tasks about letters."""

DICTIONARY = """
address airport almond animal apple apricot arrow autumn avenue balloon bamboo banana barrel basket battery beetle
bicycle blanket blossom blueberry bookkeeper bottle boulder bread bridge broccoli bubble bucket butter butterfly
button cabbage cabinet camel camera candle carpenter carpet carrot castle caterpillar cellar cherry chimney chocolate
cinnamon circle classroom coconut coffee collar committee compass cookie copper corner cotton cousin cricket crocodile
cucumber curtain daffodil daughter desert dinner doctor dolphin donkey dragon drawer dresser drummer eagle eleven
elephant elevator engine envelope evening eyebrow falcon feather festival finger firefly flamingo flannel flower
forest fountain freckle furniture garage garden garlic giraffe glasses glove goggles gooseberry grammar grape
grasshopper gravel grocery guitar hammer hammock harbor hazelnut hedgehog helmet hippopotamus holiday honey horizon
horse hummingbird hurricane iceberg igloo island jacket jasmine jelly jewel journey jungle kangaroo kettle kingdom
kitchen kitten ladder ladybug lantern lavender leather lemon lettuce library lightning lizard lobster lollipop lumber
magnet mammoth mango marble market mattress meadow melon mermaid messenger midnight millennium mirror mississippi
mitten monkey mosquito mountain mushroom mustard napkin necklace needle nettle noodle nutmeg oatmeal occasion octopus
office onion orange orchard ostrich otter oyster paddle palace pancake papaya parrot parsley passage peanut pebble
penguin peppermint piano pickle picnic pigeon pillow pineapple pistachio planet pocket possession potato pottery
prairie pretzel pumpkin puppet puzzle pyramid quarrel quiver rabbit raccoon radish railroad rainbow raspberry ribbon
river rocket rooster saddle sailor salad salmon sandal sandwich saxophone scarecrow scissors season seesaw shadow
shallow shelter shepherd shoulder silver slipper snowball soccer spaghetti sparrow spinach spring squirrel staircase
station strawberry success summer sunflower sweater syllable tambourine tangerine teapot tennessee terrace thimble
thunder ticket tobacco tomato tomorrow tornado tractor treasure trumpet tulip tunnel turkey turnip turtle umbrella
unicorn valley vanilla velvet village vinegar violin volcano waffle walnut walrus waterfall weather whistle whisper
willow window winter wizard yellow yesterday zebra zipper zucchini
"""
WORDS = DICTIONARY.split()
