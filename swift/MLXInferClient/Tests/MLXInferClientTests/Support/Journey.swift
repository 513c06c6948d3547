@testable import MLXInferClient

/// A type with every kind of property.
struct Journey: GuidedObject, Decodable, Equatable {
    enum Season: String, GuidedChoice, Decodable { case sun, sunday, winter }

    struct Stop: GuidedObject, Decodable, Equatable {
        let name: String
        let nights: Int

        static var properties: [Property<Stop>] {
            Property("name", \.name, .string(maxLength: 8))
            Property("nights", \.nights, .integer(in: 1...9))
        }
    }

    let city: String
    let season: Season
    let price: Double
    let isFar: Bool
    let stops: [Stop]
    let note: String?
    let tags: [String: Season]?

    enum CodingKeys: String, CodingKey {
        case city, season, price, stops, note, tags
        case isFar = "is_far"
    }

    static var properties: [Property<Journey>] {
        Property("city", \.city, .string(maxLength: 12), "Where to")
        Property("season", \.season)
        Property("price", \.price, .number(in: 1...999))
        Property("is_far", \.isFar)
        Property("stops", \.stops, .array(of: Stop.jsonSchema, count: 1...2))
        Property("note", \.note, .string(maxLength: 12))
        Property("tags", \.tags)
    }
}

extension PartialJSONValue {
    /// Whether this may come after an earlier value: what was whole is the same, and what was open has grown at its end.
    func continues(_ earlier: PartialJSONValue) -> Bool {
        switch (earlier.value, value) {
        case (.string(let first), .string(let second)):
            return earlier.endsInText ? second.utf8.starts(with: first.utf8) : first.utf8.elementsEqual(second.utf8)
        case (.array(let first), .array(let second)):
            guard let old = earlier.elements, let new = elements, first.count <= second.count else { return false }
            return zip(old, new).allSatisfy { $1.continues($0) }
        case (.object(let first), .object(let second)):
            guard second.keys.starts(with: first.keys) else { return false }
            return first.keys.allSatisfy { name in
                guard let old = earlier.member(name), let new = member(name) else { return false }
                return new.continues(old)
            }
        default: return earlier.value == value
        }
    }
}
