import MLXInferClient

struct Trip: GuidedObject, Decodable, Sendable {
    let city: String
    let days: Int

    static var properties: [Property<Trip>] {
        Property("city", \.city, .string(maxLength: 40))
        Property("days", \.days, .integer(in: 1...14))
    }
}

let client = Client()
let trip = try await client.generate(Trip.self, "Plan a weekend in Rome. Answer as JSON with city and days.")
print(trip.city, trip.days)
